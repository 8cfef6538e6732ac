//! Metadata → the tokenizer's files in a model folder.

use mantissa_store::Result;
use mantissa_store::gguf::Metadata;
use serde_json::{Map, Value as Json, json};

use super::{special_tokens, tokenizer_json};
use crate::chat::ChatTemplates;

/// Makes the files of a model folder that hold the tokenizer of a GGUF file: `tokenizer.json`, and
/// `tokenizer_config.json` with special tokens and chat template.
///
/// # Errors
/// [`mantissa_store::Error::Field`] names the key that is missing, malformed or of an unknown kind.
pub fn folder_files(metadata: &Metadata) -> Result<Vec<(&'static str, Json)>> {
    let tokenizer = tokenizer_json(metadata)?;
    let mut own = Map::new();
    own.insert("tokenizer_class".to_owned(), json!("PreTrainedTokenizerFast"));
    own.insert("clean_up_tokenization_spaces".to_owned(), json!(false));
    own.extend(special_tokens(metadata)?.into_iter().map(|(name, token)| (name, json!(token))));
    let templates = ChatTemplates::of_metadata(metadata)?;
    let named = |name: &str| json!({ "name": name, "template": templates.get(name) });
    match templates.names().collect::<Vec<_>>()[..] {
        [] => {}
        [ChatTemplates::DEFAULT] => {
            own.insert("chat_template".to_owned(), json!(templates.get(ChatTemplates::DEFAULT)));
        }
        ref names => {
            own.insert("chat_template".to_owned(), names.iter().map(|name| named(name)).collect());
        }
    }
    Ok(vec![("tokenizer.json", tokenizer), ("tokenizer_config.json", Json::Object(own))])
}
