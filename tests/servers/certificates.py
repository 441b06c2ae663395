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
    """`server` is good for 127.0.0.1 and for nothing else; `stranger` is signed by nobody known. The expired
    ones are as good as those, but for their dates."""

    authority: Path
    server: Signed
    client: Signed
    stranger: Signed
    expired_server: Signed
    expired_client: Signed

    @property
    def options(self) -> str:
        """What a client says that trusts the authority and shows its own certificate."""
        return (
            f"ssl_ca_certs={self.authority}"
            f"&ssl_certfile={self.client.certificate}&ssl_keyfile={self.client.key}"
        )

    def of_redis(self, server: Signed, port: int) -> dict[str, str]:
        """The settings of a Redis server that shows this certificate on the port and asks clients for one."""
        return {
            "tls-port": str(port),
            "tls-ca-cert-file": str(self.authority),
            "tls-cert-file": str(server.certificate),
            "tls-key-file": str(server.key),
        }


def make_certificates(directory: Path) -> Certificates:
    authority = _self_signed(directory, "authority")
    for_server, for_client = "subjectAltName=IP:127.0.0.1", "extendedKeyUsage=clientAuth"
    _signed_by(authority, directory, "server", for_server)
    _signed_by(authority, directory, "client", for_client)
    _self_signed(directory, "stranger")
    _signed_by(authority, directory, "expired_server", for_server, days="-1")
    _signed_by(authority, directory, "expired_client", for_client, days="-1")
    return certificates_in(directory)


def certificates_in(directory: Path) -> Certificates:
    """Those that `make_certificates` put there."""
    names = ("server", "client", "stranger", "expired_server", "expired_client")
    return Certificates(directory / "authority.pem", *(_signed(directory, name) for name in names))


def _signed(directory: Path, name: str) -> Signed:
    return Signed(directory / f"{name}.pem", directory / f"{name}.key")


def _self_signed(directory: Path, name: str) -> Signed:
    made = _signed(directory, name)
    _openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc"),
        *("-days", _DAYS, "-subj", f"/CN={name} of a test"),
        *("-keyout", str(made.key), "-out", str(made.certificate)),
    )
    return made


def _signed_by(authority: Signed, directory: Path, name: str, extension: str, days: str = _DAYS) -> None:
    made = _signed(directory, name)
    request, extensions = directory / f"{name}.csr", directory / f"{name}.ext"
    extensions.write_text(f"basicConstraints=critical,CA:FALSE\n{extension}\n")
    _openssl(
        *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-subj", f"/CN={name}"),
        *("-keyout", str(made.key), "-out", str(request)),
    )
    _openssl(  # of the two only this one takes days that are over
        *("x509", "-req", "-in", str(request), "-extfile", str(extensions), "-days", days),
        *("-CA", str(authority.certificate), "-CAkey", str(authority.key), "-out", str(made.certificate)),
    )


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
