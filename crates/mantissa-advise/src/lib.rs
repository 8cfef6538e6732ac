//! Diagnoses with a model in hand.
#![forbid(unsafe_code)]
