//! Signatures of `quality.json` in minisign's format (Ed25519 over the file or over its BLAKE2b hash; the format is described
//! at <https://jedisct1.github.io/minisign/>).

use std::path::Path;

use mantissa_quant::verify::Verification;
use mantissa_quant::{Quality, quality_path, signature_path};
use minisign_verify::{PublicKey, Signature};

use crate::error::{BadInput, Result};
use crate::settings::read_settings;

/// True if `key` names a file, not the key itself.
pub(crate) fn is_file(key: &str) -> bool {
    PublicKey::from_base64(key).is_err()
}

/// Checks the signature of the `quality.json` of `artifact` by the public key `key`, and adds the result to `found`.
///
/// # Errors
/// A key that is none; an artifact without `quality.json`.
pub(crate) fn checked(mut found: Verification, artifact: &Path, key: &str) -> Result<Verification> {
    let key = public_key(key)?;
    let (quality, signature) = (quality_path(artifact), signature_path(artifact));
    if Quality::read(artifact)?.is_none() {
        let allowed = "the file that the signature is of";
        return Err(BadInput::new(quality.display().to_string(), "no such file", allowed).into());
    }
    let name = signature.display().to_string();
    let fault = if signature.is_file() {
        let content = read_settings(&quality)?;
        match Signature::decode(&read_settings(&signature)?) {
            Err(_) => Some("expected a signature of minisign, got another file".to_owned()),
            Ok(parsed) => match key.verify(content.as_bytes(), &parsed, true) {
                Ok(()) => {
                    found.signed = Some(parsed.trusted_comment().to_owned());
                    None
                }
                Err(_) => Some("expected a signature of quality.json by this key, got another".to_owned()),
            },
        }
    } else {
        Some("expected a signature, got no file; fix: minisign -Sm quality.json".to_owned())
    };
    found.faults.extend(fault.map(|fault| format!("{name}: {fault}")));
    found.ok = found.faults.is_empty();
    Ok(found)
}

/// Reads a public key: base64, or a file of minisign.
fn public_key(key: &str) -> Result<PublicKey> {
    if let Ok(key) = PublicKey::from_base64(key) {
        return Ok(key);
    }
    let text = read_settings(Path::new(key))?;
    PublicKey::decode(&text)
        .map_err(|_| BadInput::new(key, "no public key", "a file minisign.pub, or its second line").into())
}
