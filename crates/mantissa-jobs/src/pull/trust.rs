//! Encryption of connections: cryptography without a C compiler, and the certificates that the system trusts.

use std::path::PathBuf;

use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};

use super::settings::Variables;
use crate::pull_fault::PullFault;

/// Largest file of certificates; that of Debian has 220 kB.
const MOST: u64 = 16 << 20;

/// Variables that name a file of certificates, as OpenSSL, Python's requests and curl read them.
const NAMED: [&str; 3] = ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"];

/// Files of certificates of Debian, Fedora, openSUSE, Alpine, macOS and the BSDs.
const USUAL: [&str; 7] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
    "/usr/local/share/certs/ca-root-nss.crt",
    "/usr/local/etc/ssl/cert.pem",
];

/// Returns the encryption of connections.
///
/// # Errors
/// No certificates; a processor without the instructions that the cryptography needs.
pub(super) fn encryption(variable: Variables<'_>) -> Result<TlsConfig, PullFault> {
    let builder = with_cryptography(TlsConfig::builder())?;
    Ok(builder.root_certs(certificates(variable)?).build())
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn with_cryptography(builder: ureq::tls::TlsConfigBuilder) -> Result<ureq::tls::TlsConfigBuilder, PullFault> {
    // Without the instructions, the first call would panic.
    if !graviola::util::is_cpu_supported() {
        return Err(no_cryptography("a processor without AES instructions"));
    }
    Ok(builder.unversioned_rustls_crypto_provider(std::sync::Arc::new(rustls_graviola::default_provider())))
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn with_cryptography(_: ureq::tls::TlsConfigBuilder) -> Result<ureq::tls::TlsConfigBuilder, PullFault> {
    Err(no_cryptography("another processor"))
}

fn no_cryptography(found: &str) -> PullFault {
    PullFault::Trust {
        what: "https".into(),
        expected: "an x86-64 processor with AVX2 and AES (2013 or later), or aarch64 with AES",
        found: found.into(),
        fix: "fetch the model with another program, such as curl, and name its folder",
    }
}

fn certificates(variable: Variables<'_>) -> Result<RootCerts, PullFault> {
    let named = NAMED.iter().find_map(|name| Some((*name, PathBuf::from(variable(name)?))));
    if let Some((name, path)) = named {
        let read = mantissa_store::regular::read(&path, MOST, "a PEM file of certificates");
        return match read.map(|text| parsed(&text)) {
            Ok(Some(found)) => Ok(found),
            Ok(None) => Err(none(name, format!("{} without any", path.display()))),
            Err(error) => Err(none(name, error.to_string())),
        };
    }
    let read = |path: &&str| mantissa_store::regular::read(path.as_ref(), MOST, "certificates").ok();
    let found = USUAL.iter().filter_map(read).find_map(|text| parsed(&text));
    found.ok_or_else(|| none("certificates", "none in the usual places of the system".into()))
}

fn none(what: &str, found: String) -> PullFault {
    PullFault::Trust {
        what: what.into(),
        expected: "a PEM file of certificates",
        found,
        fix: "install the package ca-certificates, or set SSL_CERT_FILE to such a file",
    }
}

/// Returns the certificates of a PEM text, if it has any.
fn parsed(text: &[u8]) -> Option<RootCerts> {
    let certificate = |item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(certificate),
        _ => None,
    };
    let found: Vec<_> = parse_pem(text).filter_map(certificate).collect();
    (!found.is_empty()).then(|| RootCerts::from(found))
}
