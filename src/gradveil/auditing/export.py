"""From a finished run to an exported protection, and the lines that use it in a client."""

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gradveil.core.errors import UserError
from gradveil.core.local_training import LocalTraining
from gradveil.core.settings import default_of, fields_of
from gradveil.core.text import listing, plural
from gradveil.protection.audited import FILE, AuditedChange, AuditedTask, Protection, registered, units_of, versions_of
from gradveil.protection.flower.arrays import STATISTICS
from gradveil.storage.run_folder import RunFolder, StoredCell
from gradveil.summary import LEAKS, CaseFacts, DefenseRow, Summary


def export(folder: RunFolder, summary: Summary, row: DefenseRow, accept_leak: bool = False) -> Protection:
    """The protection of one defense of a finished run."""
    if row.verdict == LEAKS and not accept_leak:
        raise UserError(f"updates leak under {row.spec}; choose another defense, or accept the leak with --accept-leak.")
    case, cell = summary.case, _observed(folder, row)
    training, method = case.training, registered(row.spec)
    task = AuditedTask(
        model=case.model,
        parameters=_parameters(folder, cell),
        input_shape=case.input_shape,
        num_outputs=case.num_classes,
        mean=case.mean,
        std=case.std,
        loss=case.loss,
    )
    return Protection(
        gradveil=summary.gradveil,
        defense=method.spec,
        versions=versions_of(method),
        verdict=row.verdict,
        leak_accepted=row.verdict == LEAKS,
        scope=row.scope,
        task=task,
        training=training,
        images=case.batch_size,
        units=units_of(training, case.batch_size),
        measured=AuditedChange.of(cell.changes),
    )


def choose_defense(summary: Summary, text: str | None) -> DefenseRow:
    """The row of this defense, whatever its spelling; without a text the recommended one, or the only one."""
    rows = [row for row in summary.defenses if not row.control]
    if text is None:
        rows = [summary.recommended] if summary.recommended else rows
    else:
        wanted = registered(text).spec
        rows = [row for row in rows if row.spec == text or _spec(row) == wanted]
    if len(rows) == 1:
        return rows[0]
    audited = listing(f"{row.spec} ({row.verdict})" for row in summary.defenses if not row.control) or "none"
    problem = "no defense is recommended, so name one with --defense" if text is None else f"{text} was not audited"
    raise UserError(f"{problem}; this run has: {audited}.")


def _spec(row: DefenseRow) -> str | None:
    """The text of an audited defense without settings that are the default; None for a class that is not registered."""
    try:
        return registered(row.spec).spec
    except UserError:
        return None


def _observed(folder: RunFolder, row: DefenseRow) -> StoredCell:
    """The cell with the updates that the summary speaks of."""
    cells = [c for c in folder.cells.values() if (c.kind, c.defense, c.attack) == ("observe", row.spec, "")]
    for cell in cells:
        if cell.gradient == row.gradient and cell.status == "ok" and cell.tensors_sha256:
            return cell
    raise UserError(f"{folder.path} does not hold the updates under {row.spec}; run the audit again.")


def _parameters(folder: RunFolder, cell: StoredCell) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of one update, without running statistics, which no defense acts on."""
    first = "0/0/update/"
    shapes = {n.removeprefix(first): shape for n, shape in folder.shapes(cell).items() if n.startswith(first)}
    return {n: shape for n, shape in shapes.items() if not any(fnmatchcase(n, pattern) for pattern in STATISTICS)}


# -- the lines that use it ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """Lines of code for one kind of client."""

    title: str
    code: str


def usage(row: DefenseRow, case: CaseFacts, file: str = FILE) -> list[Usage]:
    """How clients use the exported defense: those that send what the audit covers."""
    training, path = case.training, json.dumps(file, ensure_ascii=False)
    stated = f"training=gradveil.LocalTraining({_settings(training)})"
    shield = f"shield = gradveil.protect(model, {path}, data=(x, y){', ' + stated if training.kind == 'delta' else ''})"
    steps = "# train shield.model, with shield.backward(x, y) in place of loss.backward()"
    loop = Usage("A loop in PyTorch", f"import gradveil\n\n{shield}\n{steps}")
    if training.kind == "gradient":
        return [loop]
    lines = [] if "update" in row.stage else [loop]
    if tuple(row.stage) == ("update",):
        mod = f"@app.train(mods=[gradveil.flower.mod({path})])\ndef train(message, context): ..."
        lines.append(Usage("A Flower client whose training function stays as it is", f"import gradveil\n\n{mod}"))
        arrays = f"sent = gradveil.flower.protect_arrays(before, after, {path}, images=len(x), {stated})"
        lines.append(Usage("A loop that sends weights, as NumPy arrays by name", f"import gradveil\n\n{arrays}"))
    guard = f"guard = gradveil.flower.protect(message, context, model, {path}, data=(x, y))"
    steps = "# train guard.model, with guard.backward(x, y) in place of loss.backward()\nreturn guard.reply()"
    return [*lines, Usage("A Flower client that trains with a guard", f"import gradveil\n\n{guard}\n{steps}")]


def requirement(case: CaseFacts) -> str:
    """What a client must do for the audit to cover it, in a sentence."""
    training = case.training
    if training.kind == "gradient":
        return (
            "The audit covers clients that send one gradient per update. Flower clients send weight differences: audit these."
        )
    steps = plural(training.number_of_steps(case.batch_size), "step")
    return (
        f"A client must train as audited: {steps} of {training.optimizer} per round at learning rate {training.lr:g}, model in "
        f"{training.mode} mode. A Flower client's settings are read from learning-rate (or lr), local-epochs and batch-size of "
        f"its configuration, and from num-examples of its reply; otherwise state training=gradveil.LocalTraining"
        f"({_settings(training)}) and images={case.batch_size}. In other units nothing is sent."
    )


def _settings(training: LocalTraining) -> str:
    """As Python writes them, without those that are the default."""
    values = {name: (getattr(training, name), default_of(field)) for name, field in fields_of(LocalTraining).items()}
    return ", ".join(f"{name}={value!r}" for name, (value, default) in values.items() if value != default)
