"""Makes the webhook's own certificate authority and certificate, and renews each at two thirds of its life without a
gap.

A new authority is first added to the bundle that the API server trusts. The webhook serves a certificate of this
authority only once the API server has the bundle. `renew` takes the content of the Secret and the trusted bundle, and
returns what the Secret should hold. It draws keys and is pure otherwise.
"""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_LIFE = timedelta(days=10 * 365)
LEAF_LIFE = timedelta(days=365)
# Certificates begin this much earlier, because the clock of an API server may be behind.
_BACKDATE = timedelta(hours=1)
_COMMON_NAME = 64  # characters at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """PEM texts as the Secret keeps them. `bundle` holds every authority that is still valid, the newest first."""

    bundle: bytes
    ca_key: bytes
    certificate: bytes
    key: bytes


def renew(material: Material | None, trusted: bytes, hosts: Sequence[str], now: datetime) -> Material:
    """What should be in the Secret now. If nothing is due, this is `material` itself."""
    if material is None:
        bundle, ca_key = _new_authority(now)
        certificate, key = _new_leaf(bundle, ca_key, hosts, now)
        return Material(bundle=bundle, ca_key=ca_key, certificate=certificate, key=key)
    newest = x509.load_pem_x509_certificates(material.bundle)[0]
    if _is_due(newest, now):
        fresh, ca_key = _new_authority(now)
        return replace(material, bundle=fresh + _living(material.bundle, now), ca_key=ca_key)
    leaf = x509.load_pem_x509_certificate(material.certificate)
    stale = _is_due(leaf, now) or not _signed_by(leaf, newest) or _hosts(leaf) != set(hosts)
    if stale and newest in _certificates(trusted):
        certificate, key = _new_leaf(material.bundle, material.ca_key, hosts, now)
        return replace(material, certificate=certificate, key=key)

    return material


def expires_at(certificate: bytes) -> datetime:
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


def _new_authority(now: datetime) -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "valve webhook authority")])
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(name, name, now, CA_LIFE)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )

    return _pem(certificate), _pem_key(key)


def _new_leaf(bundle: bytes, ca_key: bytes, hosts: Sequence[str], now: datetime) -> tuple[bytes, bytes]:
    authority = x509.load_pem_x509_certificates(bundle)[0]
    signer = serialization.load_pem_private_key(ca_key, password=None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise ValueError("the authority's key is not one of ours (no elliptic curve key)")
    key = ec.generate_private_key(ec.SECP256R1())
    # A name of a long namespace is longer than this field may be. Clients read the alternative names alone.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:_COMMON_NAME])])
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    certificate = (
        _builder(name, authority.subject, now, LEAF_LIFE)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .sign(signer, hashes.SHA256())
    )

    return _pem(certificate), _pem_key(key)


def _builder(subject: x509.Name, issuer: x509.Name, now: datetime, life: timedelta) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATE)
        .not_valid_after(now + life)
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _hosts(leaf: x509.Certificate) -> set[str]:
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(name.value) for name in names}


def _is_due(certificate: x509.Certificate, now: datetime) -> bool:
    life = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return now >= certificate.not_valid_before_utc + life * 2 / 3


def _signed_by(leaf: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        leaf.verify_directly_issued_by(authority)
    except Exception:  # any failure means: not signed by it
        return False
    return True


def _living(bundle: bytes, now: datetime) -> bytes:
    return b"".join(_pem(c) for c in _certificates(bundle) if c.not_valid_after_utc > now)


def _certificates(bundle: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(bundle)
    except ValueError:
        return []


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _pem_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
