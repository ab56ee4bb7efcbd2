// Times and speeds, in the words the command line uses.

export const BANDS = [
  [0, "slow"],
  [50, "fair"],
  [90, "keeps pace with a person"],
  [110, "very fast"],
  [200, "faster than one can follow"],
];

export function band(tokensPerSecond) {
  return BANDS.findLast(([least]) => tokensPerSecond >= least)?.[1] ?? BANDS[0][1];
}

export function duration(ms) {
  if (ms >= 1000) return `${(ms / 1000).toFixed(1)} s`;
  return `${ms >= 10 ? ms.toFixed(0) : ms.toFixed(1)} ms`;
}

export function speed(tokensPerSecond) {
  return `${tokensPerSecond >= 10 ? tokensPerSecond.toFixed(0) : tokensPerSecond.toFixed(1)} tok/s`;
}

// An answer timed by this browser's own clock: what whoever reads it really waits for.
export class Stopwatch {
  constructor() {
    this.asked = performance.now();
    this.first = null;
    this.last = null;
    this.tokens = 0;
  }

  piece() {
    this.last = performance.now();
    this.first ??= this.last;
    this.tokens += 1; // the server sends an event per token; the true count comes with the last one
  }

  get waited() {
    return (this.first ?? performance.now()) - this.asked;
  }

  get tokensPerSecond() {
    return this.tokens > 1 && this.last > this.first ? ((this.tokens - 1) * 1000) / (this.last - this.first) : 0;
  }

  parts() {
    if (this.first === null) return [`waiting ${duration(this.waited)}`];
    const parts = [`first token ${duration(this.waited)}`];
    if (this.tokensPerSecond) parts.push(speed(this.tokensPerSecond));
    parts.push(`${this.tokens} token${this.tokens === 1 ? "" : "s"}`);
    return parts;
  }
}

// Where the server says the time went: [label, milliseconds], without what took none.
export function stages(timings) {
  const { load_ms, tokenize_ms, queue_ms, prefill_ms, decode_ms } = timings;
  const all = [
    ["loading the model", load_ms],
    ["reading the text", tokenize_ms],
    ["waiting in line", queue_ms],
    ["prompt", prefill_ms],
    ["answer", decode_ms],
  ];
  return all.filter(([, ms]) => ms >= 0.05);
}

export function details(timings) {
  const facts = [];
  const cached = timings.cached_tokens ? `, ${timings.cached_tokens} of them remembered` : "";
  if (timings.prompt_tokens) facts.push(`prompt ${timings.prompt_tokens} tokens${cached}`);
  if (timings.first_token_ms) facts.push(`first token after ${duration(timings.first_token_ms)}`);
  if (timings.tokens_per_s) facts.push(speed(timings.tokens_per_s));
  if (timings.worst_gap_ms) facts.push(`longest pause ${duration(timings.worst_gap_ms)}`);
  return facts;
}
