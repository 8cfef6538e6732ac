//! Quantization of keys and values when they enter the cache: with scales stored in a checkpoint, or by a
//! [`KvPolicy`].

pub(crate) mod book;
pub(crate) mod codec;
pub mod policy;
pub(crate) mod quantizer;
mod rows;
pub mod scheme;
pub(crate) mod side;
pub(crate) mod stored;

pub use self::codec::{HeadElement, HeadScale};
pub use self::policy::{KvParseError, KvPolicy};
pub use self::quantizer::{KvQuantizer, KvStorage};
pub use self::scheme::KvScheme;
pub use self::side::Side;
pub use self::stored::{CacheInF32, check_kv_levels};
