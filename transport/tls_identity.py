"""The TLS identity of a cluster: one Ed25519 key and one certificate, derived from the CURVE keys.

Every process that holds the key file derives the same bytes. Both sides of a connection present the certificate and
accept only the certificates of the generations that they hold; no other trust anchor exists.
"""

from __future__ import annotations

import datetime
import functools
import os
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from transport.key_ring import KeyRing
from transport.keys import ControlKeys

_LABEL = b"disagg transport tls identity v1"
_SERIAL = 1
_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)
"""Fixed dates: two processes derive identical certificates, and a wrong clock refuses nobody."""
_OP_ENABLE_KTLS = getattr(ssl, "OP_ENABLE_KTLS", 1 << 3)
"""Python names it from 3.12 on. OpenSSL 3 ignores it where the kernel has no offload."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What one generation of keys becomes."""

    certificate: bytes
    """DER."""
    pem: bytes = field(repr=False)
    """The private key and the certificate."""


def derive(keys: ControlKeys) -> Identity:
    """The identity of `keys`: Ed25519 from both secrets by HKDF-SHA256, and its self-signed certificate."""
    secret = f"{keys.server_secret}{keys.client_secret}".encode()
    seed = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=_LABEL).derive(secret)
    private = Ed25519PrivateKey.from_private_bytes(seed)
    public = private.public_key()
    raw = public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    # Generations have different names, so that a verifier with several never tries the wrong one.
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"disagg {raw[:16].hex()}")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(_SERIAL)
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .sign(private, None)
    )
    key = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Identity(
        certificate.public_bytes(serialization.Encoding.DER),
        key + certificate.public_bytes(serialization.Encoding.PEM),
    )


class Contexts:
    """TLS settings for `generations` of keys, one or more: all are accepted, the first one is presented."""

    def __init__(self, generations: Sequence[ControlKeys]) -> None:
        self._generations = tuple(generations)
        identities = [derive(keys) for keys in generations]
        self.presented = identities[0].certificate
        """Our certificate, DER."""
        self.trusted = frozenset(identity.certificate for identity in identities)
        make = functools.partial(_context, identities)
        self.server, self.client = make(ssl.PROTOCOL_TLS_SERVER), make(ssl.PROTOCOL_TLS_CLIENT)
        self.server.num_tickets = 0

    def check(self, certificate: bytes | None) -> None:
        """Raises `ssl.SSLError` unless the peer presented exactly a certificate of a valid generation."""
        if certificate not in self.trusted:
            raise ssl.SSLError("the peer's certificate is not the cluster's")

    def presenting(self, certificate: bytes) -> Contexts:
        """Contexts with the same trust that present the generation of `certificate`, one of `trusted`."""
        return Contexts(sorted(self._generations, key=lambda keys: derive(keys).certificate != certificate))


class Identities:
    """The contexts for the keys that are valid now. For any thread."""

    def __init__(self, ring: KeyRing) -> None:
        self._ring, self._lock = ring, threading.Lock()
        self._generations = ring.generations
        self._contexts = Contexts(self._generations)

    @property
    def contexts(self) -> Contexts:
        """The same object as long as the keys are the same."""
        generations = self._ring.generations
        with self._lock:
            if generations != self._generations:
                self._generations, self._contexts = generations, Contexts(generations)
            return self._contexts


def _context(identities: Sequence[Identity], protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the key is the identity; addresses change
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | _OP_ENABLE_KTLS
    context.load_verify_locations(cadata=b"".join(identity.certificate for identity in identities))
    # `ssl` reads a private key from a file only. This one lives in memory and has no name in any folder.
    descriptor = os.memfd_create("disagg-tls", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(identities[0].pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context
