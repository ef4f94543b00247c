"""The certificate authority of a job: what `replicax keys` creates.

`DIR/authority/` has the key of the authority, and stays where it was made. Each other directory is
what one task, or the tasks of one role, need: `ca.crt`, `tls.crt` and `tls.key`.
"""

from __future__ import annotations

import datetime
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from replicax.foundation import errors, lazy
from replicax.protocol.tasks import ROLES, Role
from replicax.transport.keys import CA, CERTIFICATE, KEY, Identity

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509 import oid
else:
    x509 = lazy.module("cryptography.x509")
    hashes = lazy.module("cryptography.hazmat.primitives.hashes")
    serialization = lazy.module("cryptography.hazmat.primitives.serialization")
    ec = lazy.module("cryptography.hazmat.primitives.asymmetric.ec")
    oid = lazy.module("cryptography.x509.oid")

_AUTHORITY = "authority"
_AUTHORITY_DAYS = 3_650.0
# Clocks of hosts differ.
_SKEW = datetime.timedelta(hours=1)


def create(path: Path, job: str, counts: dict[Role, int], days: float) -> None:
    """Creates the authority of a job and the certificates of its tasks in an empty directory."""
    job = job or f"job-{secrets.token_hex(4)}"
    identities: list[Identity] = []
    for role in ROLES:
        indices = range(counts[role]) if counts.get(role) else [None]
        identities += [Identity(job, role, index) for index in indices]
    Identity.parse(str(identities[0]))  # The name of the job comes from the user.
    (path / _AUTHORITY).mkdir(mode=0o700)
    authority = _new_authority(path, job)
    trusted = (path / _AUTHORITY / CA).read_bytes()
    for identity in identities:
        own = path / (
            identity.role if identity.index is None else f"{identity.role}-{identity.index}"
        )
        own.mkdir(mode=0o700)
        _replace(own / CA, trusted)
        issue(own, identity, authority, days)


def add(path: Path, role: Role, index: int, days: float) -> Path:
    """Creates the certificate of one more task."""
    job = read(_tasks(path)[0] / CERTIFICATE)[0].job
    identity = Identity.parse(f"replicax://{job}/{role}/{index}")
    own = path / f"{role}-{index}"
    if own.exists():
        raise errors.InvalidArgumentError(
            "A new certificate needs a task without one",
            f"{str(own)!r} exists",
            "Use it, or run `replicax keys renew DIR`.",
        )
    own.mkdir(mode=0o700)
    _replace(own / CA, (path / _AUTHORITY / CA).read_bytes())
    issue(own, identity, load(path), days)
    return own


def renew(path: Path, days: float) -> None:
    """Creates another authority, and new certificates for all tasks."""
    tasks = _tasks(path)
    identities = {own: read(own / CERTIFICATE)[0] for own in tasks}
    authority = _new_authority(path, identities[tasks[0]].job)
    trusted = (path / _AUTHORITY / CA).read_bytes()
    for own in tasks:
        # First: a task with a new certificate must find peers that trust it.
        _replace(own / CA, trusted)
    for own, identity in identities.items():
        issue(own, identity, authority, days)


def retire(path: Path) -> None:
    """Removes all authorities but the newest from the trusted ones."""
    trusted = (path / _AUTHORITY / CA).read_bytes()
    newest = x509.load_pem_x509_certificates(trusted)[0]
    data = newest.public_bytes(serialization.Encoding.PEM)
    for own in [path / _AUTHORITY, *_tasks(path)]:
        _replace(own / CA, data)


def read(path: Path) -> tuple[Identity, datetime.datetime]:
    """Returns the task in a certificate, and when the certificate expires."""
    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())[0]
        extension = found.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        names = extension.value.get_values_for_type(x509.UniformResourceIdentifier)
    except (ValueError, x509.ExtensionNotFound) as error:
        raise errors.InvalidArgumentError(
            "A certificate must name its task as a URI, 'replicax://JOB/ROLE/INDEX'",
            f"{str(path)!r} does not ({error})",
            "Add it to the alternative names, or make certificates with `replicax keys make DIR`.",
        ) from error
    for name in names:
        if name.startswith("replicax://"):
            return Identity.parse(name), found.not_valid_after_utc
    raise errors.InvalidArgumentError(
        "A certificate must name its task as a URI, 'replicax://JOB/ROLE/INDEX'",
        f"{str(path)!r} names {', '.join(names)[:200] or 'nothing'}",
        "Add it to the alternative names, or make certificates with `replicax keys make DIR`.",
    )


def _tasks(path: Path) -> list[Path]:
    found = sorted(entry.parent for entry in path.glob(f"*/{CERTIFICATE}"))
    if not found or not (path / _AUTHORITY / KEY).exists():
        raise errors.NotFoundError(
            "Certificates are renewed where they were made, in the directory with the authority",
            f"{str(path)!r} has none",
            "Make new ones with `replicax keys make DIR`.",
        )
    return found


# The certificate of an authority, and its private key.
Authority = tuple["x509.Certificate", "ec.EllipticCurvePrivateKey"]


def load(path: Path) -> Authority:
    """Reads the newest authority of a directory of `create`."""
    certificate = x509.load_pem_x509_certificates((path / _AUTHORITY / CA).read_bytes())[0]
    key = serialization.load_pem_private_key((path / _AUTHORITY / KEY).read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return certificate, key


def _new_authority(path: Path, job: str) -> Authority:
    """Creates an authority; it is the first of the trusted ones."""
    own = path / _AUTHORITY
    key = ec.generate_private_key(ec.SECP256R1())
    # Its name is its own: several authorities of one job are trusted during a renewal.
    name = _name(f"{job} {secrets.token_hex(4)}")
    builder = _builder(name, name, key.public_key(), _AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(True, 0), critical=True)
    builder = builder.add_extension(_usage(is_authority=True), critical=True)
    found = builder.sign(key, hashes.SHA256())
    trusted = found.public_bytes(serialization.Encoding.PEM)
    older = (own / CA).read_bytes() if (own / CA).exists() else b""
    _replace(own / KEY, _private(key))
    _replace(own / CA, trusted + older)
    return found, key


def issue(own: Path, identity: Identity, authority: Authority, days: float) -> None:
    """Writes a certificate and its key.

    A process that reads between the two writes finds a pair that does not fit, keeps the old one,
    and reads again after the second.
    """
    certificate, authority_key = authority
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_name(str(identity)[:64]), certificate.subject, key.public_key(), days)
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(str(identity))])
    builder = builder.add_extension(names, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(False, None), critical=True)
    builder = builder.add_extension(_usage(is_authority=False), critical=True)
    both = [oid.ExtendedKeyUsageOID.CLIENT_AUTH, oid.ExtendedKeyUsageOID.SERVER_AUTH]
    builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
    found = builder.sign(authority_key, hashes.SHA256())
    _replace(own / KEY, _private(key))
    _replace(own / CERTIFICATE, found.public_bytes(serialization.Encoding.PEM))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(oid.NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW if days > 0 else now + datetime.timedelta(days=days) - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _replace(path: Path, data: bytes) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
