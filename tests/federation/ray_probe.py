"""Starts the engine's Ray and prints who can reach it, and whom it asks; run in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

STRANGER = Path(__file__).parents[2] / "benchmarks" / "faults" / "ray_stranger.py"


def listening(port: int) -> set[str]:
    """The addresses, as Linux writes them, on which this port is open."""
    addresses = set()
    for kind in ("tcp", "tcp6"):
        with open(f"/proc/net/{kind}", encoding="ascii") as table:
            for line in table.readlines()[1:]:
                address, number = line.split()[1].split(":")
                if line.split()[3] == "0A" and int(number, 16) == port:
                    addresses.add(address)
    return addresses


def main(home: str) -> None:
    listener, requests = socket.create_server(("127.0.0.1", 0)), list[bytes]()

    def listen() -> None:
        while True:
            connection, _ = listener.accept()
            requests.append(connection.recv(200))
            connection.close()

    threading.Thread(target=listen, daemon=True).start()
    proxy = f"http://127.0.0.1:{listener.getsockname()[1]}"  # every request to another machine arrives here
    os.environ.update(http_proxy=proxy, HTTP_PROXY=proxy, no_proxy="", NO_PROXY="")

    from gradveil.federation import flower_engine

    flower_engine.configure()
    import ray

    flower_engine._start_ray(1)
    address = ray.get_runtime_context().gcs_address
    print("listens", *listening(int(address.split(":")[1])))
    actor = ray.remote(lambda: os.environ["http_proxy"])
    print("proxy", os.environ["http_proxy"] == ray.get(actor.remote()) == proxy)
    command = [sys.executable, str(STRANGER), address, home]
    print("stranger", subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout.strip())
    ray.shutdown()
    print("requests", requests)


if __name__ == "__main__":
    main(sys.argv[1])
