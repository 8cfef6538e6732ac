//! HTML page: title, style, content.

use mantissa_store::{Output, write_file_atomic};

use super::Html;

/// Colors of both modes, then sizes. Series colors follow Okabe & Ito (2008), distinguishable with color
/// vision deficiency; yellow is darker in light mode, and black is white in dark mode.
const STYLE: &str = "
:root { color-scheme: light dark; --text: #1b1b1b; --soft: #63666b; --line: #d9dbde; --page: #fff; --plate: #f5f6f7;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #b59100; --c5: #56b4e9; --c6: #1b1b1b; --c7: #8a5a00; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e6e6; --soft: #9fa3a9; --line: #3a3d42; --page: #16181b; --plate: #1f2226;
  --c0: #4aa8e0; --c1: #f08a3c; --c2: #2cc79a; --c3: #e29ac4; --c4: #f0e442; --c5: #8fd0f5; --c6: #fff; --c7: #c99a4a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.grid { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); }
figure { margin: .5rem 0; padding: .5rem; background: var(--plate); border-radius: .5rem; min-width: 0; }
figcaption { font-weight: 600; font-size: .9rem; } .legend { font-size: .8rem; color: var(--soft); }
.legend span { margin-right: .9rem; white-space: nowrap; } .legend i { display: inline-block; width: .9rem; height: .2rem;
  margin-right: .3rem; vertical-align: middle; background: currentColor; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg .label { fill: var(--text); } svg .gridline { stroke: var(--line); stroke-width: 1; }
svg path { fill: none; stroke-width: 1.6; stroke-linejoin: round; } svg path.faint { opacity: .35; stroke-width: 1; }
svg .end { text-anchor: end; } svg .middle { text-anchor: middle; }
.s0 { color: var(--c0); } .s1 { color: var(--c1); } .s2 { color: var(--c2); } .s3 { color: var(--c3); }
.s4 { color: var(--c4); } .s5 { color: var(--c5); } .s6 { color: var(--c6); } .s7 { color: var(--c7); }
svg path { stroke: currentColor; } svg circle { fill: currentColor; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; overflow-wrap: normal; }
th, td { padding: .25rem .75rem .25rem 0; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
pre { overflow-x: auto; padding: .75rem; background: var(--plate); border-radius: .5rem; font-size: .85rem; }
summary { cursor: pointer; padding: .35rem 0; } p { max-width: 48rem; }
";

/// HTML page in one file.
#[derive(Clone, Debug)]
pub struct Page {
    title: String,
    body: Html,
}

impl Page {
    /// Starts a page with its title.
    pub fn new(title: &str) -> Self {
        Page { title: title.to_owned(), body: Html::element("h1", &[], [Html::text(title)]) }
    }

    /// Appends content.
    pub fn push(&mut self, content: Html) {
        self.body.push(content);
        self.body.push(Html::text("\n"));
    }

    /// Returns the whole file. Its content security policy forbids a browser to load or run anything.
    pub fn html(&self) -> String {
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
             <title>{}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{}</body>\n</html>\n",
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
    }
}
