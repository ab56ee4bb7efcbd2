// The little Markdown that models write, as DOM nodes. Text only ever becomes text: no HTML is parsed.

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const BULLET = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const INLINE = /(`+)(.+?)\1(?!`)|\*\*(\S(?:.*?\S)?)\*\*|(?<![\w*])\*(\S(?:[^*\n]*\S)?)\*(?![\w*])/gs;

// Cut a text into blocks: {kind: "code" | "heading" | "list" | "rule" | "text", ...}.
export function blocks(text) {
  const found = [];
  const lines = text.split("\n");
  let paragraph = [];
  const close = () => {
    if (paragraph.length) found.push({ kind: "text", text: paragraph.join("\n") });
    paragraph = [];
  };
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i];
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    const bullet = BULLET.exec(line);
    if (fence) {
      close();
      const code = [];
      const end = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
      while (++i < lines.length && !end.test(lines[i])) code.push(lines[i]);
      found.push({ kind: "code", language: fence[2], text: code.join("\n") });
    } else if (RULE.test(line)) {
      close();
      found.push({ kind: "rule" });
    } else if (heading) {
      close();
      found.push({ kind: "heading", level: heading[1].length, text: heading[2] });
    } else if (bullet) {
      close();
      const ordered = bullet[2] !== undefined;
      const item = { depth: bullet[1].length, ordered, start: Number(bullet[2] ?? 1), text: bullet[3] };
      const last = found.at(-1);
      // A deeper item belongs to the list that is open, whatever its own mark is.
      const fits = last?.kind === "list" && last.open;
      if (fits && (last.items[0].ordered === ordered || item.depth > last.items[0].depth)) last.items.push(item);
      else found.push({ kind: "list", open: true, items: [item] });
    } else if (!line.trim()) {
      close();
    } else {
      const last = found.at(-1);
      if (!paragraph.length && last?.kind === "list" && last.open && /^\s{2,}/.test(line)) {
        last.items.at(-1).text += `\n${line.trim()}`;
      } else {
        paragraph.push(line);
      }
    }
    if (paragraph.length && found.length) found.at(-1).open = false;
  }
  close();
  return found;
}

function node(tag, text) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  return made;
}

function inline(parent, text) {
  let from = 0;
  for (const match of text.matchAll(INLINE)) {
    parent.append(text.slice(from, match.index));
    if (match[2] !== undefined) {
      const code = node("code", match[2]);
      code.dir = "ltr";
      parent.append(code);
    } else {
      const strong = match[3] !== undefined;
      parent.append(inline(node(strong ? "strong" : "em"), strong ? match[3] : match[4]));
    }
    from = match.index + match[0].length;
  }
  parent.append(text.slice(from));
  return parent;
}

function element(block) {
  if (block.kind === "rule") return node("hr");
  if (block.kind === "code") return codeBlock(block);
  if (block.kind === "list") return list(block.items);
  // Headings of an answer begin below the page's own.
  const made = inline(node(block.kind === "heading" ? `h${Math.min(block.level + 2, 6)}` : "p"), block.text);
  made.dir = "auto";
  return made;
}

// Items of growing depth become lists within lists.
function list(items) {
  const open = []; // the lists around the item at hand, outermost first: {depth, node}
  for (const item of items) {
    while (open.length > 1 && item.depth < open.at(-1).depth) open.pop();
    if (!open.length || item.depth > open.at(-1).depth + 1) {
      const made = node(item.ordered ? "ol" : "ul");
      if (item.ordered && item.start !== 1) made.start = item.start;
      made.dir = "auto";
      open.at(-1)?.node.lastElementChild.append(made);
      open.push({ depth: item.depth, node: made });
    }
    const line = inline(node("li"), item.text);
    line.dir = "auto";
    open.at(-1).node.append(line);
  }
  return open[0].node;
}

function codeBlock(block) {
  const figure = node("figure");
  const caption = node("figcaption");
  const copy = node("button", "Copy");
  copy.type = "button";
  copy.className = "copy";
  copy.dataset.copies = "code";
  caption.append(node("span", block.language || "text"), copy);
  const pre = node("pre");
  pre.tabIndex = 0; // a wide block is scrolled by keyboard, too
  pre.dir = "ltr";
  pre.append(node("code", block.text));
  figure.append(caption, pre);
  return figure;
}

// Shows a growing text in `parent`, touching only the blocks that changed.
export class Rendering {
  constructor(parent) {
    this.parent = parent;
    this.keys = [];
  }

  show(text) {
    const all = blocks(text);
    all.forEach((block, i) => {
      const key = JSON.stringify(block);
      if (this.keys[i] === key) return;
      const made = element(block);
      const old = this.parent.children[i];
      if (old) old.replaceWith(made);
      else this.parent.append(made);
      this.keys[i] = key;
    });
    while (this.parent.children.length > all.length) this.parent.lastElementChild.remove();
    this.keys.length = all.length;
  }
}
