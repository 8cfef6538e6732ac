// Measures a page in the browser and writes the faults into the document, one a line. Run by tests/pages.rs.
(() => {
  const faults = [];
  const say = (what) => { if (faults.length < 40) faults.push(what.replace(/\s+/g, ' ').slice(0, 200)); };
  document.querySelectorAll('details').forEach((details) => { details.open = true; });

  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) {
    say(`the page is ${document.documentElement.scrollWidth} px wide in a window of ${width} px`);
  }
  const inside = (box, outer, slack) => box.left >= outer.left - slack && box.right <= outer.right + slack
    && box.top >= outer.top - slack && box.bottom <= outer.bottom + slack;
  const name = (element) => `${element.tagName.toLowerCase()}.${element.getAttribute('class') || ''} "${element.textContent.slice(0, 40)}"`;
  for (const element of document.body.querySelectorAll('*:not(svg *)')) {
    if (element.parentElement.closest('.wide, pre')) continue;
    const box = element.getBoundingClientRect();
    if (box.width > 0 && (box.right > width + 1 || box.left < -1)) say(`beyond the window: ${name(element)}`);
  }

  // A table that scrolls by a few pixels looks cut off; a wider one says that it scrolls.
  for (const box of document.querySelectorAll('.wide')) {
    const beyond = box.scrollWidth - box.clientWidth;
    if (beyond > 0 && beyond < 40) say(`scrolls by ${beyond} px: ${box.getAttribute('aria-label').slice(0, 40)}`);
  }

  // What fills the width of the page fills all of it.
  const column = document.querySelector('main').clientWidth - 2 * parseFloat(getComputedStyle(document.querySelector('main')).paddingLeft);
  for (const element of document.querySelectorAll('main > :is(p, pre, figure, .tiles, .wide, .grid, .columns)')) {
    const own = element.getBoundingClientRect().width;
    if (own > 0 && Math.abs(own - column) > 1) say(`${own.toFixed(0)} px wide in a column of ${column} px: ${name(element)}`);
  }

  // Text of a drawing: readable, inside it, and clear of other text.
  for (const svg of document.querySelectorAll('figure > svg')) {
    const outer = svg.getBoundingClientRect();
    const unit = outer.width / svg.viewBox.baseVal.width;
    const texts = [...svg.querySelectorAll('text')].map((text) => [text, text.getBoundingClientRect()]);
    for (const [text, box] of texts) {
      const size = parseFloat(getComputedStyle(text).fontSize) * unit;
      if (size < 10 || size > 17) say(`text of ${size.toFixed(1)} px: ${name(text)}`);
      if (!inside(box, outer, 2)) say(`outside its drawing: ${name(text)}`);
    }
    const shown = texts.filter(([text]) => getComputedStyle(text).visibility === 'visible');
    shown.forEach(([a, first], i) => shown.slice(i + 1).forEach(([b, second]) => {
      const across = Math.min(first.right, second.right) - Math.max(first.left, second.left);
      const down = Math.min(first.bottom, second.bottom) - Math.max(first.top, second.top);
      // Boxes of text are higher than its letters.
      if (across > 2 && down > 5) say(`texts overlap: ${name(a)} and ${name(b)} in "${svg.getAttribute('aria-label').slice(0, 40)}"`);
    }));
    if (!svg.querySelector('path, rect, circle')) say('an empty drawing');
    if (!svg.getAttribute('aria-label')) say('a drawing without aria-label');
  }
  for (const cell of document.querySelectorAll('th')) {
    if (!cell.getAttribute('scope')) say(`a heading without scope: ${name(cell)}`);
  }

  // Contrast of all text against the nearest background, as WCAG 2 defines it.
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  canvas.canvas.width = canvas.canvas.height = 1;
  const seen = new Map();
  const rgb = (color) => {
    if (!seen.has(color)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = color;
      canvas.fillRect(0, 0, 1, 1);
      seen.set(color, [...canvas.getImageData(0, 0, 1, 1).data]);
    }
    return seen.get(color);
  };
  const luminance = (color) => {
    const [r, g, b] = color.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = rgb(getComputedStyle(at).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest('script, style')) continue;
    const style = getComputedStyle(element);
    const color = rgb(element.closest('svg') ? style.fill : style.color);
    const [a, b] = [luminance(color), luminance(background(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) say(`contrast ${ratio.toFixed(1)}: ${name(element)}`);
  }

  const result = document.createElement('pre');
  result.id = 'probe';
  const theme = luminance(background(document.body)) < 0.2 ? 'dark' : 'light';
  result.textContent = `PROBE ${theme} ${width}\n${faults.join('\n')}\nEND`;
  document.body.append(result);
})();
