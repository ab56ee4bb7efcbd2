// Talking to the server that this page came from.

const KEY = "chabok-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

// What went wrong, and what to do about it.
export class Problem extends Error {
  constructor(message, remedy = "", status = 0) {
    super(message);
    this.remedy = remedy;
    this.status = status;
  }
}

const REMEDIES = {
  401: "This server wants an API key: enter it under Settings.",
  403: "This key may not do that; ask whoever runs the server.",
  404: "Choose another model above.",
  413: "Shorten the message, or start a new chat.",
  503: "The server is starting or stopping; try again in a moment.",
};

function headers() {
  const all = { "Content-Type": "application/json" };
  if (key.get()) all.Authorization = `Bearer ${key.get()}`;
  return all;
}

async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers() });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server cannot be reached.", "Check that chabok serve is still running, then try again.");
  }
  if (!response.ok) throw await problemOf(response);
  return response;
}

async function problemOf(response) {
  let message = `The server answered ${response.status} ${response.statusText}`.trim();
  let code = "";
  try {
    const body = await response.json();
    message = body.error?.message ?? body.error ?? message;
    code = body.error?.code ?? "";
  } catch {
    // not JSON: the status has to do
  }
  let remedy = REMEDIES[response.status] ?? "";
  if (code === "invalid_api_key") remedy = "The server does not know this API key: enter another one under Settings.";
  if (response.status === 429) {
    const seconds = Number(response.headers.get("Retry-After")) || 0;
    remedy = seconds ? `Try again in about ${Math.ceil(seconds)} s.` : "Try again in a moment.";
  }
  return new Problem(String(message), remedy, response.status);
}

// Names of the models that are served, and of those in memory: {names, loaded}.
export async function models() {
  const listed = await (await request("v1/models")).json();
  const running = await (await request("api/ps")).json();
  return {
    names: listed.data.map((model) => model.id),
    loaded: new Set(running.models.map((model) => model.name)),
  };
}

// What the server is still busy with before it is ready, such as "loading smollm2"; "" when it is.
export async function busyWith() {
  const response = await fetch("ready");
  if (response.status !== 503) return "";
  try {
    return (await response.json()).status || "starting";
  } catch {
    return "starting";
  }
}

// An answer as it is written: the parsed chunks of a streamed chat completion.
export async function* answer(body, signal) {
  const response = await request("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let ended = false;
  try {
    while (!ended) {
      const { value, done } = await reader.read();
      if (done) break;
      const events = (rest + value).split(/\r?\n\r?\n/);
      rest = events.pop();
      for (const event of events) {
        const data = event
          .split(/\r?\n/)
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart())
          .join("\n");
        if (!data) continue; // a comment that keeps the connection alive
        if (data === "[DONE]") {
          ended = true;
          break;
        }
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Problem(chunk.error.message ?? String(chunk.error), "", chunk.error.status ?? 0);
        yield chunk;
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Problem) throw error;
    throw new Problem("The connection broke off.", "Check that chabok serve is still running, then try again.");
  }
  if (!ended) throw new Problem("The answer broke off before its end.", "Try again.");
}
