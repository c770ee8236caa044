"""The app deployed as users do it: a SuperLink and two SuperNodes that talk TLS, on loopback.

    python deploy.py [--defense prune:ratio=0.9] [--rounds 2] [--out runs/deployed]

It makes the certificates itself, starts the three, runs the app with its one line changed, shows what the server captured
of each client, and ends every process it started by its number.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
from pathlib import Path

import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from flower_cifar.task import choose_data
from local import captured, copy_of_app, federation, free_port, settings

from gradveil.storage.updates import load_update


def certificates(folder: Path) -> dict[str, Path]:
    """An authority for this run alone, and a certificate of it for this machine's loopback address."""
    folder.mkdir(mode=0o700)
    authority_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "flower-cifar authority")])
    server_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)

    def certificate(name: x509.Name, key: ec.EllipticCurvePrivateKey, authority: bool) -> x509.Certificate:
        addresses = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(authority_name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
            .sign(authority_key, hashes.SHA256())
        )

    pem = serialization.Encoding.PEM
    paths = {name: folder / name for name in ("ca.crt", "server.crt", "server.key")}
    paths["ca.crt"].write_bytes(certificate(authority_name, authority_key, True).public_bytes(pem))
    paths["server.crt"].write_bytes(certificate(server_name, server_key, False).public_bytes(pem))
    paths["server.key"].touch(mode=0o600)
    plain = serialization.NoEncryption()
    paths["server.key"].write_bytes(server_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return paths


def deploy(defense: str, rounds: int, images: int, out: Path) -> None:
    with federation() as here:
        tls = certificates(here.folder / "certificates")
        server = ["--ssl-ca-certfile", tls["ca.crt"], "--ssl-certfile", tls["server.crt"], "--ssl-keyfile", tls["server.key"]]
        port = free_port()
        link = ["--host", "127.0.0.1", "--port", str(port), *map(str, server)]
        here.start("superlink", "flower-superlink", *link)
        here.connect(port, certificate=tls["ca.crt"])
        for client in range(2):
            node = ["--superlink", f"127.0.0.1:{port}", "--root-certificates", str(tls["ca.crt"])]
            api = ["--host", "127.0.0.1", "--port", str(free_port()), *map(str, server)]
            place = ["--node-config", f"partition-id={client} num-partitions=2"]
            here.start(f"supernode-{client}", "flower-supernode", *node, *api, *place)
        app = copy_of_app(here.folder, defense)
        here.run(app, settings(out, rounds=rounds, images=images), timeout=300)
        show(out, defense)


def show(out: Path, defense: str) -> None:
    print(f"what the server captured in round 1, with {defense} on the clients:")
    for path in captured(out):
        update, _ = load_update(path)
        values = torch.cat([t.flatten() for t in update.tensors.values()])
        zeros = float((values == 0).double().mean())
        print(
            f"  {path.name}: {len(values)} weights of {update.examples} images, {zeros:.1%} unchanged, norm {values.norm():.3g}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--defense", default="prune:ratio=0.9", help="an update-stage defense, as name:key=value")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--images", type=int, default=100, help="of each client")
    parser.add_argument("--out", type=Path, default=Path("runs/deployed"), help="what the server writes")
    parser.add_argument("--data", help="in place of CIFAR-10, such as mnist-5k, which is embedded")
    options = parser.parse_args()
    choose_data(options.data)
    deploy(options.defense, options.rounds, options.images, options.out.resolve())
