//! HTML page: title, style, content.

use mantissa_store::{Output, write_file_atomic};

use super::Html;

/// Style of every page; its comments give the reasons.
const STYLE: &str = include_str!("style.css");

/// HTML page in one file.
#[derive(Clone, Debug)]
pub struct Page {
    title: String,
    body: Html,
    /// Seconds after which a browser loads the page again.
    reloads: Option<u32>,
}

impl Page {
    /// Starts a page with its title.
    pub fn new(title: &str) -> Self {
        Page { title: title.to_owned(), body: Html::element("h1", &[], [Html::text(title)]), reloads: None }
    }

    /// Makes a browser load the page again every so many seconds: what it describes still changes.
    #[must_use]
    pub fn reloading(self, seconds: u32) -> Self {
        Page { reloads: Some(seconds), ..self }
    }

    /// Appends content.
    pub fn push(&mut self, content: Html) {
        self.body.push(content);
        self.body.push(Html::text("\n"));
    }

    /// Returns the whole file. Its content security policy forbids a browser to load or run anything.
    pub fn html(&self) -> String {
        let reload = self.reloads.map_or_else(String::new, |seconds| {
            format!("<meta http-equiv=\"refresh\" content=\"{seconds}\">\n")
        });
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
             {reload}<title>{}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{}</main>\n</body>\n</html>\n",
            Html::text(&self.title).as_str(),
            self.body.as_str()
        )
    }

    /// Writes the file atomically.
    ///
    /// # Errors
    /// I/O.
    pub fn write(&self, output: &Output) -> Result<(), mantissa_store::Error> {
        write_file_atomic(output, self.html().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_loads_nothing() {
        let mut page = Page::new("a & b");
        page.push(Html::paragraph("text"));
        let html = page.html();
        assert!(html.contains("<title>a &amp; b</title>") && html.contains("<p>text</p>"), "{html}");
        assert!(!html.contains("://") && !html.contains("<script") && !html.contains("url("), "{html}");
        assert!(!html.contains("refresh"), "{html}");
        assert!(page.reloading(10).html().contains("<meta http-equiv=\"refresh\" content=\"10\">"));
    }

    /// A phone has about 24 em; a wider box would scroll sideways.
    #[test]
    fn no_width_is_beyond_a_phone() {
        for declaration in STYLE.split(['{', ';', '}']).map(str::trim) {
            let Some((property, value)) = declaration.split_once(':') else { continue };
            let value = value.trim();
            let ems = value.trim_end_matches("rem").trim_end_matches("em").parse::<f64>();
            let fits = ["100%", "auto"].contains(&value) || ems.is_ok_and(|ems| ems <= 20.0);
            assert!(!["width", "min-width"].contains(&property.trim()) || fits, "{declaration}");
        }
    }
}
