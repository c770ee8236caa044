"""What the server of a Flower app can rebuild, then the same app with one line changed.

    python demo.py [--defense gaussian:std=0.01] [--victims 4] [--data mnist-5k] [--out runs/flower-cifar]

Two runs of the app as it is, two with the line changed: one round in which every client holds a single image, whose
updates are attacked, and a training with 500 images per client, whose accuracy is told. Pictures go to OUT.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from flower_cifar.task import Net, choose_data, dataset, images_of
from local import captured, copy_of_app, federation, free_port, settings
from PIL import Image
from torch import Tensor

import gradveil as gv
from gradveil.core.types import Batch
from gradveil.metrics import identify, psnr, ssim
from gradveil.storage.updates import load_update

CLIENTS = 10


def demo(defense: str, victims: int, rounds: int, attack: str, out: Path) -> None:
    told = {}
    with federation() as here:
        port = free_port()
        address = ["--host", "127.0.0.1", "--port", str(port)]
        here.start("superlink", "flower-superlink", "--insecure", "--simulation", *address)
        here.connect(port)
        for name, line in (("stock", None), ("protected", defense)):
            app = copy_of_app(here.folder, line)
            nodes = f"num-supernodes={CLIENTS} client-resources-num-cpus=1 init-args-num-cpus=2"
            one, many = out / name / "one-image", out / name / "training"
            for folder in (one, many):
                shutil.rmtree(folder, ignore_errors=True)
            quick = settings(one, rounds=1, images=1, batch_size=1, local_epochs=1)
            print(f"{name}: one round with a single image per client …", flush=True)
            here.run(app, quick, "--federation-config", nodes, timeout=600)
            print(f"{name}: {rounds} rounds of training …", flush=True)
            here.run(app, settings(many, rounds=rounds), "--federation-config", nodes, timeout=1800)
            print(f"{name}: attacking {victims} clients …", flush=True)
            accuracy = json.loads((many / "accuracy.json").read_text())["acc_test"][-1]
            told[name] = {"defense": line or "none", "acc_test": accuracy, **leak(one, victims, attack, out / f"{name}.png")}
            print(f"{name}: {told[name]}", flush=True)
    (out / "demo.json").write_text(json.dumps({"data": dataset().name, "attack": attack, **told}, indent=1) + "\n")
    print(f"pictures, originals above and rebuilt below: {out / 'stock.png'}, {out / 'protected.png'}")


def leak(folder: Path, victims: int, attack: str, picture: Path) -> dict[str, object]:
    """What the captured updates of the first clients give away; the client's number is read only to score them."""
    updates = {}
    for path in captured(folder):
        _, facts = load_update(path)
        updates[int(facts["reported"]["metrics"]["part"])] = path
    rows = []
    for client in range(victims):
        rebuilt = gv.attack_update(updates[client], Net, attacks=[attack], before=folder / "round-001" / "before.safetensors")
        rows.append(rebuilt.by_attack[rebuilt.best].images)
    guess, truth = torch.cat(rows), [images_of(client, CLIENTS, 1) for client in range(victims)]
    private = Batch(torch.cat([b.x for b in truth]), torch.cat([b.y for b in truth]))
    draw(private.x, guess, picture)
    seen = identify(private.x, private.y, guess, dataset().pool())
    return {
        "identified": f"{int(seen.identified.sum())} of {victims}",
        "chance": round(float(seen.chance.mean()), 4),
        "psnr": round(float(psnr(private.x, guess).mean()), 1),
        "ssim": round(float(ssim(private.x, guess).mean()), 2),
    }


def draw(truth: Tensor, guess: Tensor, path: Path) -> None:
    """Originals above, what was rebuilt below."""
    sheet = torch.cat([torch.cat(list(row), dim=2) for row in (truth, guess)], dim=1)
    pixels = (sheet.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    image = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[..., 0])
    path.parent.mkdir(parents=True, exist_ok=True)
    image.resize((image.width * 4, image.height * 4), Image.Resampling.NEAREST).save(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--defense", default="gaussian:std=0.01", help="an update-stage defense, as name:key=value")
    parser.add_argument("--victims", type=int, default=4, choices=range(1, CLIENTS + 1), help="how many to attack")
    parser.add_argument("--rounds", type=int, default=10, help="of the training")
    parser.add_argument("--attack", default="swift")
    parser.add_argument("--out", type=Path, default=Path("runs/flower-cifar"))
    parser.add_argument("--data", help="in place of CIFAR-10, such as mnist-5k, which is embedded")
    options = parser.parse_args()
    choose_data(options.data)
    demo(options.defense, options.victims, options.rounds, options.attack, options.out.resolve())
