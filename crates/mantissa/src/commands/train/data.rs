//! The data of a training run in a sentence.

use mantissa_jobs::data_report::{ChatReport, DataReport, TextReport};

use crate::output::{count, number_of};

/// Says what was read, what trains, and what is cut or left out.
pub(in crate::commands) fn sentence(data: &DataReport) -> String {
    match data {
        DataReport::Chat(chat) => of_chat(chat),
        DataReport::Text(text) => of_text(text),
    }
}

/// Says how many things of a kind there are, in short.
fn many(n: u64, name: &str) -> String {
    format!("{} {}", count(n), number_of(n, name))
}

fn of_chat(chat: &ChatReport) -> String {
    let ChatReport { conversations, left_out, cut, lost_tokens, trained, trained_tokens, length, .. } = chat;
    let mut text = format!(
        "{}: {} trained on, {} of answers, {} with the end of an answer",
        many(*conversations, "conversation"),
        count(*trained),
        many(*trained_tokens, "token"),
        count(chat.trained_ends)
    );
    for (n, what) in [
        (chat.held_out, "held out".to_owned()),
        (left_out.too_long, format!("left out (no token of an answer within {length} tokens)")),
        (left_out.without_targets, "left out (without an answer)".to_owned()),
        (*cut, format!("cut to {length} tokens")),
    ] {
        if n > 0 {
            text += &format!("; {} {what}", count(n));
        }
    }
    if *lost_tokens > 0 {
        text +=
            &format!("; {} lost, {} of answers", many(*lost_tokens, "token"), count(chat.lost_answer_tokens));
    }
    text
}

fn of_text(text: &TextReport) -> String {
    let TextReport { documents, empty, tokens, windows, length, left_over, held_out_tokens, .. } = text;
    let mut said = format!(
        "{}, {} in {} of {length}",
        many(*documents, "document"),
        many(*tokens, "token"),
        many(*windows, "window")
    );
    for (n, what) in [
        (*held_out_tokens, ("token", "held out")),
        (*empty, ("empty record", "left out")),
        (*left_over, ("token", "at the end left over")),
    ] {
        if n > 0 {
            said += &format!("; {} {}", many(n, what.0), what.1);
        }
    }
    said
}

#[cfg(test)]
mod tests {
    use mantissa_jobs::data_report::LeftOut;

    use super::*;

    #[test]
    fn losses_are_said_where_there_are_some() {
        let mut chat = ChatReport {
            conversations: 10,
            left_out: LeftOut::default(),
            cut: 0,
            lost_tokens: 0,
            lost_answer_tokens: 0,
            trained_tokens: 90,
            trained_ends: 10,
            trained: 10,
            held_out: 0,
            length: 64,
            longest: 40,
        };
        let none = "10 conversations: 10 trained on, 90 tokens of answers, 10 with the end of an answer";
        assert_eq!(sentence(&DataReport::Chat(chat.clone())), none);
        chat.left_out = LeftOut { too_long: 1, without_targets: 2 };
        (chat.cut, chat.lost_tokens, chat.lost_answer_tokens) = (3, 50, 20);
        let told = sentence(&DataReport::Chat(chat));
        assert!(
            told.ends_with(
                "; 1 left out (no token of an answer within 64 tokens); 2 left out (without an answer); 3 cut to 64 tokens; \
                 50 tokens lost, 20 of answers"
            ),
            "{told}"
        );
    }
}
