//! Names of the parameters of recurrent mixers, and of what joins and mixes parallel streams.

use crate::kinds::{SideKind, VectorKind};

/// Names of a recurrent mixer within a layer; its linear layers are among `Names::linears`.
#[derive(Clone, Copy, Debug)]
pub struct MixerNames {
    /// Small projections.
    pub sides: &'static [(SideKind, &'static str)],
    /// Vectors.
    pub vectors: &'static [(VectorKind, &'static str)],
}

impl MixerNames {
    /// No mixer.
    pub const NONE: Self = MixerNames { sides: &[], vectors: &[] };

    /// Name of a small projection.
    pub fn side(&self, kind: SideKind) -> &'static str {
        self.sides.iter().find(|(known, _)| *known == kind).map_or("", |(_, name)| name)
    }

    /// Name of a vector.
    pub fn vector(&self, kind: VectorKind) -> &'static str {
        self.vectors.iter().find(|(known, _)| *known == kind).map_or("", |(_, name)| name)
    }
}
