"""Certificates for private servers: an authority of our own, and what it has signed."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

_DAYS = "2"


@dataclass(frozen=True, slots=True)
class Signed:
    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Certificates:
    """`server` is good for 127.0.0.1 and for nothing else; `stranger` is signed by nobody known."""

    authority: Path
    server: Signed
    client: Signed
    stranger: Signed

    @property
    def options(self) -> str:
        """What a client says that trusts the authority and shows its own certificate."""
        return (
            f"ssl_ca_certs={self.authority}"
            f"&ssl_certfile={self.client.certificate}&ssl_keyfile={self.client.key}"
        )


def make_certificates(directory: Path) -> Certificates:
    authority = _self_signed(directory, "authority")
    server = _signed_by(authority, directory, "server", "subjectAltName=IP:127.0.0.1")
    client = _signed_by(authority, directory, "client", "extendedKeyUsage=clientAuth")
    return Certificates(authority.certificate, server, client, _self_signed(directory, "stranger"))


def _self_signed(directory: Path, name: str) -> Signed:
    made = Signed(directory / f"{name}.pem", directory / f"{name}.key")
    _openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc"),
        *("-days", _DAYS, "-subj", f"/CN={name} of a test"),
        *("-keyout", str(made.key), "-out", str(made.certificate)),
    )
    return made


def _signed_by(authority: Signed, directory: Path, name: str, extension: str) -> Signed:
    made = Signed(directory / f"{name}.pem", directory / f"{name}.key")
    _openssl(
        *("req", "-x509", "-CA", str(authority.certificate), "-CAkey", str(authority.key)),
        *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-days", _DAYS),
        *("-subj", f"/CN={name}", "-addext", "basicConstraints=critical,CA:FALSE", "-addext", extension),
        *("-keyout", str(made.key), "-out", str(made.certificate)),
    )
    return made


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
