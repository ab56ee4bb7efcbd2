// The page itself: what the controls do.

import { Answer, question } from "./conversation.js";
import { Stopwatch } from "./figures.js";
import { answer, busyWith, key, models, Problem } from "./server.js";

const at = (id) => document.getElementById(id);
const [picker, prompt, send, conversation, scroller] = ["model", "prompt", "send", "conversation", "scroller"].map(at);

let messages = []; // the conversation as the server is told it
let running = null; // the AbortController of the answer being written
let loaded = new Set();

// Models, and whether the server is ready.

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

function notice(text) {
  const box = at("notice");
  if (box.textContent !== text) box.textContent = text;
  box.hidden = !text;
}

let connecting = false;

async function connect() {
  if (connecting) return;
  connecting = true;
  try {
    for (;;) {
      try {
        await listModels();
        const busy = await busyWith();
        if (!busy) break;
        notice(`The server is ${busy}. You can write already; the answer comes when it is ready.`);
      } catch (problem) {
        if (problem.status === 401) {
          askForKey(problem.remedy);
          return;
        }
        notice([problem.message, problem.remedy].filter(Boolean).join(" "));
      }
      await pause(1500);
    }
    notice("");
  } finally {
    connecting = false;
  }
}

async function listModels() {
  const { names, loaded: inMemory } = await models();
  loaded = inMemory;
  const chosen = picker.disabled ? "" : picker.value;
  const options = names.map((name) => new Option(name, name, false, name === chosen));
  picker.replaceChildren(...(options.length ? options : [new Option("No models")]));
  picker.disabled = options.length === 0;
}

function askForKey(text) {
  notice(text);
  at("settings").open = true;
  at("key-field").hidden = false;
  at("key").focus();
}

// Asking and answering.

function body() {
  const system = at("system").value.trim();
  const asked = {
    model: picker.value,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  // valueAsNumber is NaN where nothing stands: then the server's own default holds.
  const temperature = at("temperature").valueAsNumber;
  const longest = at("max-tokens").valueAsNumber;
  if (!Number.isNaN(temperature)) asked.temperature = temperature;
  if (!Number.isNaN(longest)) asked.max_tokens = longest;
  return asked;
}

async function ask(text) {
  at("welcome").hidden = true;
  if (messages.at(-1)?.role === "user") messages.pop(); // nobody answered it: roles have to alternate
  messages.push({ role: "user", content: text });
  conversation.append(question(text));
  await reply();
}

async function reply() {
  const model = picker.value;
  const shown = new Answer(model);
  const stopwatch = new Stopwatch();
  const mine = (running = new AbortController());
  const last = messages.length; // whatever ends this answer, only what came before it stays as it is
  let timings = null;
  let reason = null;
  conversation.append(shown.node);
  setRunning(true);
  follow();
  const clock = setInterval(() => {
    const loading = stopwatch.first === null && !loaded.has(model);
    shown.say(loading ? [`loading ${model}`, ...stopwatch.parts()] : stopwatch.parts());
  }, 100);
  try {
    for await (const chunk of answer(body(), mine.signal)) {
      const choice = chunk.choices?.[0];
      const { content, reasoning_content: reasoning } = choice?.delta ?? {};
      if (content || reasoning) {
        stopwatch.piece();
        const near = isNearEnd();
        shown.add(content ?? "", reasoning ?? "");
        if (near) requestAnimationFrame(() => follow());
      }
      reason = choice?.finish_reason ?? reason;
      timings = chunk.timings ?? timings;
      stopwatch.tokens = chunk.usage?.completion_tokens ?? stopwatch.tokens;
    }
    loaded.add(model);
    const note = reason === "length" ? "cut at the longest answer allowed" : "";
    shown.end(stopwatch, timings, note);
    announce(shown.text || "The model ended without an answer.");
  } catch (error) {
    if (mine.dropped) return;
    shown.end(stopwatch, null, error.name === "AbortError" ? "stopped" : "");
    if (error.name === "AbortError") announce("Stopped.");
    else failed(shown, error);
  } finally {
    clearInterval(clock);
    if (!mine.dropped) {
      if (shown.text) messages.splice(last, 0, { role: "assistant", content: shown.text });
      running = null;
      setRunning(false);
      if (isNearEnd(160)) follow();
    }
  }
}

function failed(shown, error) {
  const problem = error instanceof Problem ? error : new Problem(String(error.message ?? error));
  shown.fail(problem, async () => {
    if (running) return;
    if (messages.at(-1)?.role === "assistant") messages.pop();
    shown.node.remove();
    prompt.focus();
    await reply();
  });
  if (problem.status === 401) askForKey(problem.remedy);
}

function stop() {
  running?.abort();
}

function newChat() {
  if (running) {
    running.dropped = true;
    stop();
    running = null;
    setRunning(false);
  }
  messages = [];
  conversation.replaceChildren();
  at("welcome").hidden = false;
  announce("New chat.");
  prompt.focus();
}

// What is seen and heard.

function setRunning(on) {
  document.body.classList.toggle("running", on);
  at("send-label").textContent = on ? "Stop" : "Send";
  send.title = on ? "Stop (Esc)" : "Send (Enter)";
  setSendable();
}

function setSendable() {
  send.disabled = !running && !prompt.value.trim();
}

function announce(text) {
  at("announcer").textContent = text;
}

function isNearEnd(margin = 80) {
  return scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < margin;
}

function follow() {
  scroller.scrollTop = scroller.scrollHeight;
}

function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

// Controls.

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) {
    stop();
    return;
  }
  const text = prompt.value.trim();
  if (!text || picker.disabled) return;
  prompt.value = "";
  fit();
  ask(text);
});

prompt.addEventListener("input", () => {
  fit();
  setSendable();
});

prompt.addEventListener("keydown", (event) => {
  // Enter that ends the composition of a character (as in Japanese) sends nothing.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) at("composer").requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) {
    event.preventDefault();
    stop();
    prompt.focus();
  }
});

conversation.addEventListener("click", async (event) => {
  const button = event.target.closest("button.copy");
  if (!button) return;
  const source = button.dataset.copies === "code" ? button.closest("figure").querySelector("pre") : button.closest(".answer").querySelector(":scope > .prose");
  try {
    await navigator.clipboard.writeText(source.innerText);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Copying is not allowed here";
  }
  await pause(1500);
  button.textContent = "Copy";
});

at("new").addEventListener("click", newChat);

at("key").value = key.get();
at("key-field").hidden = !key.get();
at("key").addEventListener("change", () => {
  key.set(at("key").value.trim());
  connect();
});

setRunning(false);
connect();
