"""A certificate authority of a test's own, and what a server of 127.0.0.1 needs from it."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from pathlib import Path

PEM = serialization.Encoding.PEM


def authority(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """The authority's own certificate as a file, and the settings of a server that it signed."""
    key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in ("tests", "127.0.0.1")]
    now = dt.datetime.now(dt.UTC)

    def certificate(subject: int, public: ec.EllipticCurvePublicKey, extension: x509.ExtensionType) -> bytes:
        made = x509.CertificateBuilder().subject_name(names[subject]).issuer_name(names[0]).public_key(public)
        made = made.serial_number(subject + 1).not_valid_before(now - dt.timedelta(days=1))
        made = made.not_valid_after(now + dt.timedelta(days=1)).add_extension(extension, critical=subject == 0)
        return made.sign(key, hashes.SHA256()).public_bytes(PEM)

    ca = folder / "ca.pem"
    ca.write_bytes(certificate(0, key.public_key(), x509.BasicConstraints(ca=True, path_length=None)))
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    private = server_key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    chain = folder / "server.pem"
    chain.write_bytes(private + certificate(1, server_key.public_key(), address))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    return ca, context
