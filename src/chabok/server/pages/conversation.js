// What stands in the conversation: questions, answers, and what is to be said of each.

import { band, details, duration, stages } from "./figures.js";
import { Rendering } from "./markdown.js";

function make(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function question(text) {
  const article = make("article", "question");
  article.append(make("h2", "unseen", "You"));
  const body = make("div", "bubble");
  for (const paragraph of text.split(/\n{2,}/)) {
    const p = make("p", "", paragraph);
    p.dir = "auto";
    body.append(p);
  }
  article.append(body);
  return article;
}

export class Answer {
  constructor(model) {
    this.text = "";
    this.reasoning = "";
    this.node = make("article", "answer");
    this.node.setAttribute("aria-busy", "true");
    this.thoughts = make("details", "thoughts");
    this.thoughts.hidden = true;
    this.thoughtsTitle = make("summary", "", "Thinking…");
    this.thoughtsText = make("div", "prose");
    this.thoughts.append(this.thoughtsTitle, this.thoughtsText);
    this.body = make("div", "prose");
    this.foot = make("div", "foot");
    this.figures = make("p", "figures");
    this.foot.append(this.figures);
    this.node.append(make("h2", "unseen", model), this.thoughts, this.body, this.foot);
    this.rendering = new Rendering(this.body);
    this.reasoningRendering = new Rendering(this.thoughtsText);
    this.frame = 0;
  }

  add(content, reasoning) {
    this.text += content;
    this.reasoning += reasoning;
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.rendering.show(this.text);
    if (this.reasoning) {
      this.thoughts.hidden = false;
      this.reasoningRendering.show(this.reasoning);
      this.thoughtsTitle.textContent = this.text ? "Thoughts" : "Thinking…";
    }
  }

  say(parts) {
    const text = parts.join(" · ");
    if (this.figures.textContent !== text) this.figures.textContent = text;
  }

  end(stopwatch, timings, note) {
    this.draw();
    this.thoughtsTitle.textContent = "Thoughts";
    this.node.setAttribute("aria-busy", "false");
    const parts = stopwatch.parts();
    if (stopwatch.first === null) parts.length = 0;
    if (stopwatch.tokensPerSecond) parts.push(band(stopwatch.tokensPerSecond));
    if (note) parts.push(note);
    this.say(parts);
    if (timings) this.foot.append(breakdown(timings));
    if (this.text) {
      const copy = make("button", "copy", "Copy");
      copy.type = "button";
      copy.dataset.copies = "answer";
      this.foot.append(copy);
    }
  }

  fail(problem, again) {
    const box = make("div", "problem");
    box.setAttribute("role", "alert");
    box.append(make("p", "", problem.message.replace(/^\p{Ll}/u, (letter) => letter.toUpperCase())));
    if (problem.remedy) box.append(make("p", "faint", problem.remedy));
    const button = make("button", "quiet", "Try again");
    button.type = "button";
    button.addEventListener("click", again);
    box.append(button);
    this.node.append(box);
  }
}

// Where the server's time went: a bar of stages, each named with its time.
function breakdown(timings) {
  const box = make("details", "breakdown");
  box.append(make("summary", "", "Where the time went"));
  const bar = make("div", "stages");
  bar.setAttribute("aria-hidden", "true");
  const list = make("dl", "stage-list");
  stages(timings).forEach(([label, ms], i) => {
    const part = make("span", `stage-${i % 5}`);
    part.style.flexGrow = String(ms); // through the object model, which the content policy allows
    bar.append(part);
    const row = make("div", `stage-${i % 5}`);
    row.append(make("dt", "", label), make("dd", "", duration(ms)));
    list.append(row);
  });
  box.append(bar, list, make("p", "faint", `By the server's clock: ${details(timings).join(" · ")}`));
  return box;
}
