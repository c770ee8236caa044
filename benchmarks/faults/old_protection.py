"""Faults of 0.1.0 in protection: noise that can be computed, doors that let private values out, Flower and its Ray."""

from __future__ import annotations

import subprocess
from pathlib import Path

from old_case import TRAIN, Place, case

MESSAGES = """
import copy, io, sys, torch, numpy as np, gradveil as gv
from gradveil import flower
from gradveil.defenses import Defense
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
x, y = torch.rand(6, 1, 6, 6), torch.arange(6) % 3
context = Context(run_id=1, node_id=7, node_config={}, state=RecordDict(), run_config={})
def message(state):
    made = Message(RecordDict({"arrays": ArrayRecord(state)}), dst_node_id=7, message_type="train")
    made.metadata.__dict__["_message_id"] = "one"
    return made
def of(update):
    class Made(Defense):
        stages = frozenset({"update"})
        def update(self, tensors, step): return update(tensors)
    return Made()
def trained(m, c):
    state = {n: t + 0.1 for n, t in net.state_dict().items()}
    return Message(RecordDict({"arrays": ArrayRecord(state)}), reply_to=m)
def report(send):
    try: reply = send()
    except Exception as error: print("refused", type(error).__name__)
    else: print("refused" if reply.has_error() else "sent")
"""
GUARD = """
guard = flower.protect(message(net.state_dict()), context, net, of(answer), data=(x, y))
guard.backward(x, y); torch.optim.SGD(guard.model.parameters(), lr=0.1).step()
report(guard.reply)
"""
MOD = "report(lambda: flower.mod(defense)(message(net.state_dict()), context, handler))\n"
STRANGER = str(Path(__file__).with_name("ray_stranger.py"))
WATCHED = """
import os, runpy, signal, socket, subprocess, sys, threading, time
listener, requests, words = socket.create_server(("127.0.0.1", 0)), [], []
def listen():
    while True:
        connection, _ = listener.accept()
        requests.append(connection.recv(200)); connection.close()
def watch():
    while not (ray := sys.modules.get("ray")) or not getattr(ray, "is_initialized", bool)():
        time.sleep(0.1)
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, STRANGER, address, os.getcwd()]
    words.append(subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip())
    os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for its background jobs
for target in (listen, watch):
    threading.Thread(target=target, daemon=True).start()
proxy = "http://127.0.0.1:%d" % listener.getsockname()[1]  # every request to another machine arrives here
os.environ.update(http_proxy=proxy, HTTP_PROXY=proxy, no_proxy="", NO_PROXY="")
sys.argv = ["gradveil", "train", "--engine", "flower", "--data", "data.npz", "--model", "smlp", "--rounds", "3000"]
sys.argv += ["--clients", "2", "--out", "train", "--quiet"]
try:
    runpy.run_module("gradveil", run_name="__main__")
except BaseException as error:
    print("ended", type(error).__name__)
print("stranger:", *words, "| requests to other machines:", len(requests))
"""


@case("two processes draw different noise")
def noise_differs(place: Place) -> str | None:
    text = TRAIN + 'gv.protect(net, "gaussian:std=1.0", data=(x, y)).backward(x, y); print(net[1].weight.grad.sum().item())'
    first, second = (place.python(text) for _ in range(2))
    if first.returncode or second.returncode:
        return (first.stderr or second.stderr)[-100:]
    return "the same noise" if first.stdout == second.stdout else None


@case("noise from the default seed cannot be subtracted")
def noise_stays(place: Place) -> str | None:
    """The noise that a second shield draws, on images of one's own, is no help against the first."""
    return place.says(
        TRAIN + "def grads(defense, x, y):\n"
        "    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3)); model.load_state_dict(net.state_dict())\n"
        "    gv.protect(model, defense, data=(x, y)).backward(x, y); return model[1].weight.grad\n"
        "clear, sent = grads('none', x, y), grads('gaussian:std=1.0', x, y)\n"
        "other = torch.rand(6, 1, 6, 6)\n"
        "guessed = sent - (grads('gaussian:std=1.0', other, y) - grads('none', other, y))\n"
        "error = float((guessed - clear).norm() / clear.norm())\n"
        "print('holds' if error > 1 else f'relative error {error:.0e} after the subtraction')\n",
        "holds",
    )


@case("two protected copies differ")
def copies_differ(place: Place) -> str | None:
    place.pictures("src", 4)
    for copy in ("one", "two"):
        done = place.gradveil("protect", "src", copy, "--defense", "ats", "--quiet")
        if done.returncode:
            return done.stderr[-100:]
    one, two = ([p.read_bytes() for p in sorted((place.folder / c).rglob("*.png"))] for c in ("one", "two"))
    return "the same pictures twice" if one == two else None


@case("an image encoded before a restart is not encoded again")
def one_encoding(place: Place) -> str | None:
    """The shield's memory is saved where the version can do so; the gradient of one image shows its encoding."""
    return place.says(
        TRAIN + "def grad(shield, i):\n"
        "    net.zero_grad(); shield.backward(x[i:i + 1], y[i:i + 1]); return net[1].weight.grad.clone()\n"
        "shield = gv.protect(net, 'ats:policy=43-4-43', data=(x, y)); first = grad(shield, 0)\n"
        "memory = shield.state_dict() if hasattr(shield, 'state_dict') else None\n"
        "shield = gv.protect(net, 'ats:policy=43-4-43', data=(x, y))\n"
        "if memory: shield.load_state_dict(memory)\n"
        "grad(shield, 1)\n"
        "print('holds' if torch.equal(grad(shield, 0), first) else 'encoded twice, differently')\n",
        "holds",
    )


@case("guard: a defense that returns nothing sends nothing")
def guard_empty(place: Place) -> str | None:
    return place.says(MESSAGES + "answer = lambda tensors: {}\n" + GUARD, "refused")


@case("guard: a defense that returns NaN sends nothing")
def guard_not_finite(place: Place) -> str | None:
    nan = "answer = lambda tensors: {n: t * float('nan') for n, t in tensors.items()}\n"
    return place.says(MESSAGES + nan + GUARD, "refused")


@case("mod: a defense that returns NaN sends nothing")
def mod_not_finite(place: Place) -> str | None:
    nan = "defense, handler = of(lambda tensors: {n: t * float('nan') for n, t in tensors.items()}), trained\n"
    return place.says(MESSAGES + nan + MOD, "refused")


@case("mod: complex arrays do not leave unprotected")
def mod_complex(place: Place) -> str | None:
    text = (
        "def handler(m, c):\n"
        "    state = {n: Array((t + 0.1).numpy().astype(np.complex64)) for n, t in net.state_dict().items()}\n"
        "    return Message(RecordDict({'arrays': ArrayRecord(state)}), reply_to=m)\n"
        "defense = 'gaussian:std=1.0'\n"
    )
    return place.says(MESSAGES + text + MOD, "refused")


@case("guard: the same message id with another model brings other noise")
def noise_follows_the_model(place: Place) -> str | None:
    """Without training, an answer is the received model plus noise."""
    return place.says(
        MESSAGES + "noise = []\n"
        "for factor in (1.0, 2.0):\n"
        "    state = {n: t * factor for n, t in net.state_dict().items()}\n"
        "    guard = flower.protect(message(state), context, copy.deepcopy(net), 'gaussian:std=1.0', data=(x, y))\n"
        "    sent = guard.reply().content['arrays']['1.weight'].numpy()\n"
        "    noise.append(torch.tensor(sent) - state['1.weight'])\n"
        "print('differs' if (noise[0] - noise[1]).abs().max() > 1e-3 else 'the same noise')\n",
        "differs",
    )


@case("capture: broken replies never stop a round")
def broken_replies(place: Place) -> str | None:
    text = MESSAGES + (
        "from flwr.serverapp.strategy import FedAvg\n"
        "class OneNode:\n"
        "    def get_node_ids(self): return [7]\n"
        "def reply(node, examples, bias):\n"
        "    arrays = ArrayRecord(net.state_dict()); arrays['1.bias'] = bias\n"
        "    content = RecordDict({'arrays': arrays, 'metrics': MetricRecord({'num-examples': examples})})\n"
        "    made = Message(content, reply_to=sent); made.metadata.__dict__['_src_node_id'] = node; return made\n"
        "lying = io.BytesIO(); np.lib.format.write_array_header_1_0(\n"
        "    lying, {'descr': '<f4', 'fortran_order': False, 'shape': (10**11,)})\n"
        "good = Array(net[1].bias.detach().numpy())\n"
        "broken = {'num-examples=inf': (float('inf'), good),\n"
        "          'no bytes': (4, Array('float32', (3,), 'numpy.ndarray', b'')),\n"
        "          'lying header': (4, Array('float32', (3,), 'numpy.ndarray', lying.getvalue()))}\n"
        "stopped = []\n"
        "for name, (examples, bias) in broken.items():\n"
        "    strategy = flower.capture(FedAvg(min_train_nodes=1, min_available_nodes=1), 'seen')\n"
        "    config = ConfigRecord({'lr': 0.1})\n"
        "    (sent,) = strategy.configure_train(1, ArrayRecord(net.state_dict()), config, OneNode())\n"
        "    try: strategy.aggregate_train(1, [reply(7, 4, good), reply(8, examples, bias)])\n"
        "    except Exception as error: stopped.append(f'{name}: {type(error).__name__}')\n"
        "print('stopped by ' + ', '.join(stopped) if stopped else 'holds')\n"
    )
    return place.says(text, "holds")


@case("the Flower engine's Ray lets no stranger in and asks no other machine")
def ray_is_closed(place: Place) -> str | None:
    place.audit_words()  # writes data.npz
    text = f"STRANGER = {STRANGER!r}\n{WATCHED}"
    done: subprocess.CompletedProcess[str] = place.run(["-c", text], limited=False)
    last = done.stdout.strip().splitlines()[-1:] or [done.stderr[-100:]]
    return None if last[0].startswith("stranger: refused") and last[0].endswith(": 0") else last[0]
