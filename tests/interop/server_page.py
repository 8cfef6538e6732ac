#!/usr/bin/env python3
"""Drives the page of `mantissa serve` in headless Chromium: a conversation, a reload, copy, regenerate, stop, a comparison of two
precisions; and on a phone the empty page and an answer that stays in view.

    server_page.py MANTISSA MODEL OTHER OUT [--chromium /usr/bin/chromium]

MODEL and OTHER are two precisions of one model, such as a folder and its quantization. Starts a server, fails if a step fails, if
the console has an error, if a request leaves the server's origin, or if a part of the page is wider than the window. Writes
screenshots at 390 and 1440 pixels, light and dark, to OUT. Needs the Python package playwright and a Chromium.
"""

import argparse
import pathlib
import re
import socket
import subprocess
import sys
import time
import urllib.request

from playwright.sync_api import expect, sync_playwright

PROMPT = "Once upon a time there was a little dog"


def serve(args):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [args.mantissa, "serve", args.model, "--also", f"other={args.other}", "--port", str(port), "--parallel", "4", "--quiet"]
    server = subprocess.Popen(command)
    for _ in range(200):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
            return server, f"http://127.0.0.1:{port}/"
        except OSError:
            time.sleep(0.1)
    server.kill()
    sys.exit("the server did not start")


def converse(page):
    page.get_by_label("Seed").fill("1")
    page.get_by_label("New tokens").fill("60")
    box = page.locator("#prompt")
    box.fill(PROMPT)
    box.press("Enter")
    expect(page.locator("#send")).to_be_enabled(timeout=60_000)
    answer = page.locator(".turn.model").last
    assert len(answer.locator(".text").inner_text()) > 40
    assert re.search(r"\d+ tokens of prompt .* new", answer.locator(".cost").inner_text())
    # The second turn reads the first from the cache.
    box.fill(" The dog")
    page.locator("#send").click()
    expect(page.locator("#send")).to_be_enabled(timeout=60_000)
    assert page.locator(".turn.user").count() == 2 and page.locator(".turn.model").count() == 2


def keep(page):
    """The conversation is there after a reload; its last answer is copied, and made anew."""
    text = page.locator(".turn.model .text").last.inner_text()
    page.reload()
    expect(page.locator("#about")).not_to_be_empty()
    assert page.locator(".turn.model .text").last.inner_text() == text and page.locator(".turn.user").count() == 2
    page.get_by_label("Seed").fill("9")
    page.get_by_label("New tokens").fill("30")
    page.get_by_role("button", name="Regenerate").last.click()
    expect(page.locator("#send")).to_be_disabled()
    expect(page.locator("#send")).to_be_enabled(timeout=60_000)
    assert page.locator(".turn.user").count() == 2 and page.locator(".turn.model").count() == 2
    again = page.locator(".turn.model .text").last.inner_text()
    assert again != text
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy").last.click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()").strip() == again.strip()


def phone(browser, url, out):
    """The empty page helps, and a long answer stays in view."""
    page = browser.new_page(viewport={"width": 390, "height": 700}, has_touch=True)
    page.goto(url)
    expect(page.locator("#curl")).to_contain_text("curl http")
    assert page.locator("#tries button").count() == 3
    screenshots(page, out)
    page.set_viewport_size({"width": 390, "height": 700})
    page.locator("summary").first.click()
    page.get_by_label("New tokens").fill("300")
    page.locator("summary").first.click()
    page.locator("#tries button").first.click()
    expect(page.locator("#send")).to_be_enabled(timeout=60_000)
    end, bottom = page.evaluate(
        "[document.querySelector('.turn.model').getBoundingClientRect().bottom, document.querySelector('#scroll').getBoundingClientRect().bottom]"
    )
    assert end <= bottom + 2, f"the answer ends at {end}, below {bottom}"
    page.close()


def stop(page):
    page.get_by_label("New tokens").fill("100000")
    page.locator("#prompt").fill(PROMPT)
    page.locator("#prompt").press("Enter")
    expect(page.locator("#stop")).to_be_enabled()
    expect(page.locator(".turn.model .text").nth(2)).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_enabled(timeout=5_000)
    # Asked for again and again here: the page's policy lets no other script wait inside it.
    deadline = time.time() + 10
    while page.evaluate("fetch('/slots').then((r) => r.json()).then((slots) => slots.length)") > 0:
        assert time.time() < deadline, "the stopped answer still holds a slot"
        time.sleep(0.05)
    page.get_by_role("button", name="Clear").click()
    assert page.locator(".turn").count() == 0
    page.get_by_label("New tokens").fill("60")


def compare(page):
    page.get_by_role("button", name="Compare").first.click()
    page.get_by_label("Temperature").fill("0")
    page.locator("#prompt").fill(PROMPT)
    page.locator("#send").click()
    expect(page.locator("#verdict")).to_contain_text("Mean KL", timeout=60_000)
    verdict = page.locator("#verdict").inner_text()
    first, second = (page.locator(f"#text-{side} i") for side in "ab")
    assert first.count() > 10 and second.count() > 10
    assert page.locator("#worst tbody tr").count() > 0
    parted = re.search(r"part at token (\d+)", verdict)
    if parted:
        at = int(parted[1]) - 1
        assert first.nth(at).inner_text() != second.nth(at).inner_text()
        assert all(first.nth(i).text_content() == second.nth(i).text_content() for i in range(at))
    return verdict


def screenshots(page, out):
    for width, height in ((390, 844), (1440, 900)):
        for scheme in ("light", "dark"):
            page.set_viewport_size({"width": width, "height": height})
            page.emulate_media(color_scheme=scheme)
            root = "document.documentElement"
            wide = page.evaluate(f"{root}.scrollWidth > innerWidth || {root}.scrollHeight > innerHeight")
            assert not wide, f"the page is larger than {width} × {height} pixels"
            page.screenshot(path=out / f"page-{width}-{scheme}.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mantissa")
    parser.add_argument("model")
    parser.add_argument("other")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    server, url = serve(args)
    faults = []
    try:
        with sync_playwright() as play:
            browser = play.chromium.launch(executable_path=args.chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.on("request", lambda request: None if request.url.startswith((url, "data:")) else faults.append(request.url))
            page.goto(url)
            expect(page.locator("#about")).not_to_be_empty()
            # Every control has a name, and the keyboard reaches it.
            unnamed = page.evaluate(
                "[...document.querySelectorAll('button, input, select, textarea')].filter((e) => !(e.labels?.length || e.textContent.trim() || e.getAttribute('aria-label'))).length"
            )
            assert unnamed == 0, f"{unnamed} controls without a name"
            converse(page)
            (args.out / "chat").mkdir(exist_ok=True)
            screenshots(page, args.out / "chat")
            page.set_viewport_size({"width": 1440, "height": 900})
            keep(page)
            stop(page)
            print(compare(page))
            screenshots(page, args.out)
            (args.out / "empty").mkdir(exist_ok=True)
            phone(browser, url, args.out / "empty")
            browser.close()
    finally:
        server.terminate()
        code = server.wait(timeout=30)
    if faults or code != 0:
        sys.exit(f"faults: {faults}, exit code of the server: {code}")
    print("the page works: conversation, reload, copy, regenerate, stop, comparison, phone; no console errors, no other origin")


if __name__ == "__main__":
    main()
