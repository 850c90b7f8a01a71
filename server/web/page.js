// The status page: polls /stats once a second and chats over /v1/chat/completions. No library, no build step.
"use strict";

const $ = (id) => document.getElementById(id);
const POLL_MS = 1000;
const HISTORY = 120;

let key = sessionStorage.getItem("glm53-key") || "";
let turns = [];
let running = null;
let before = null;
let loaded = false;
const rates = [];

function headers() {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function getJson(path) {
  const reply = await fetch(path, { headers: headers(), cache: "no-store" });
  $("key-box").hidden = reply.status !== 401;
  if (reply.status === 401) setText("key-note", key ? "The server refused this key." : "This server wants an API key.");
  if (!reply.ok) throw new Error(`${path}: ${reply.status}`);
  return reply.json();
}

// ---- small helpers ----

function element(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

// Live regions are read out at every change: what stays the same must not be written again.
function setText(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

function pairs(id, entries) {
  const nodes = entries.flatMap(([name, value]) => [element("dt", name), element("dd", value)]);
  $(id).replaceChildren(...nodes);
}

const count = (n) => Number(n || 0).toLocaleString("en");
const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "none yet");
const words = (name) => name.replaceAll("_", " ");

function bytes(n) {
  const units = ["B", "kB", "MB", "GB"];
  let i = 0;
  while (n >= 1000 && i < units.length - 1) { n /= 1000; i += 1; }
  return `${n.toFixed(i ? 1 : 0)} ${units[i]}`;
}

function duration(seconds) {
  if (seconds < 60) return `${seconds.toFixed(0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

// ---- status ----

function showPhase(phase, text = phase, detail = "") {
  $("what").dataset.phase = phase;
  setText("what", text);
  setText("detail", detail);
  $("load").hidden = phase !== "loading";
}

function showStatus(stats) {
  if (stats.loading) {
    $("load").value = stats.loading.progress;
    showPhase("loading", `loading: ${stats.loading.stage}`, `${(100 * stats.loading.progress).toFixed(0)} %`);
  } else {
    showPhase(stats.status, stats.status, stats.status === "ready" ? `up ${duration(stats.uptime_s)}` : "");
  }
}

function showSpeed(requests, now) {
  const tokens = new Map(requests.map((r) => [r.id, r.completion_tokens]));
  const seconds = before ? (now - before.now) / 1000 : 0;
  let total = 0;
  const rows = requests.map((r) => {
    const since = before ? r.completion_tokens - (before.tokens.get(r.id) || 0) : 0;
    const rate = seconds > 0 ? since / seconds : r.tokens_per_s;
    total += rate;
    const row = element("li");
    const speed = r.phase === "decode" ? `${rate.toFixed(1)} tokens/s` : r.phase;
    row.append(element("span", `${r.route.replace("/v1/", "").replace("chat/completions", "chat")}, ${count(r.completion_tokens)} tokens`), element("span", speed));
    return row;
  });
  before = { now, tokens };
  $("streams").replaceChildren(...rows);
  $("rate").textContent = total.toFixed(1);
  rates.push(total);
  if (rates.length > HISTORY) rates.shift();
  drawSpark();
}

function drawSpark() {
  const top = Math.max(1, ...rates);
  const step = 240 / (HISTORY - 1);
  const seconds = [...new Array(HISTORY - rates.length).fill(0), ...rates];
  const points = seconds.map((r, i) => `${(i * step).toFixed(1)},${(46 - (44 * r) / top).toFixed(1)}`);
  const paths = [["area", `M0,48L${points.join("L")}L240,48Z`], ["line", `M${points.join("L")}`]].map(([name, d]) => {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("class", name);
    path.setAttribute("d", d);
    return path;
  });
  $("spark").replaceChildren(...paths);
}

// Numbers of routed experts by where they were computed; engines without lanes have one.
function lanesOf(engine) {
  if (engine.lanes) return Object.entries(engine.lanes);
  return engine.routed_picks_served ? [["cpu", engine.routed_picks_served]] : [];
}

function showLanes(engine) {
  const lanes = lanesOf(engine).filter(([, n]) => typeof n === "number");
  const whole = lanes.reduce((sum, [, n]) => sum + n, 0);
  $("lanes-box").hidden = !whole;
  const bars = lanes.map(([, n]) => {
    const bar = element("i");
    bar.style.width = `${(100 * n) / (whole || 1)}%`;
    return bar;
  });
  const names = lanes.map(([name, n]) => element("li", `${words(name)} ${percent(n, whole)}`));
  $("lanes").setAttribute("aria-label", names.map((n) => n.textContent).join(", "));
  $("lanes").replaceChildren(...bars);
  $("lanes-key").replaceChildren(...names);
}

function showCounters(stats) {
  const engine = stats.engine || {};
  const totals = stats.totals;
  pairs("queue", [
    ["running", `${stats.running} of ${stats.queue.max_running}`],
    ["waiting", `${stats.queue.waiting} of ${stats.queue.max_queue}`],
    ["refused", count(stats.queue.refused)],
    ["answers", count(totals.streams)],
    ["tokens read", count(totals.prompt_tokens)],
    ["tokens written", count(totals.completion_tokens)],
  ]);
  showLanes(engine);
  const cache = [["prompt tokens reused", percent(totals.cached_tokens, totals.prompt_tokens)]];
  const experts = engine.expert_cache;
  if (experts) cache.push(["experts found in VRAM", percent(experts.hits, experts.hits + experts.misses)]);
  const lane = engine.split;
  if (lane) cache.push(["CPU lane", lane.on ? `${count(lane.workers)} workers, ${lane.b_ms} ms an expert` : `off: ${lane.off_because}`]);
  $("cache-box").hidden = !totals.prompt_tokens && !experts;
  pairs("cache", cache);
  const expertBytes = engine.expert_bytes ? { experts: engine.expert_bytes } : {};
  const memory = Object.entries({ ...stats.memory, ...expertBytes, ...engine.memory }).filter(([, n]) => typeof n === "number");
  $("memory-box").hidden = !memory.length;
  pairs("memory", memory.map(([name, n]) => [words(name.replace(/_bytes$/, "")), bytes(n)]));
}

async function showLoaded() {
  try {
    const info = await getJson("server_info");
    document.title = `${info.served_model_name}, glm53`;
    pairs("loaded", [
      ["model", info.served_model_name],
      ["checkpoint", info.model],
      ["mode", info.mode],
      ["device", info.device],
      ["context", count(info.context_length)],
      ["loaded in", duration(info.load_s)],
    ]);
    $("warnings-box").hidden = !info.warnings.length;
    $("warnings").replaceChildren(...info.warnings.map((w) => element("li", w)));
    return true;
  } catch {
    return false;
  }
}

async function refresh() {
  try {
    const stats = await getJson("stats");
    showStatus(stats);
    showSpeed(stats.requests, performance.now());
    showCounters(stats);
    if (!loaded && stats.status === "ready") loaded = await showLoaded();
  } catch {
    loaded = false;
    showPhase("down", $("key-box").hidden ? "not reachable" : "needs an API key");
    showSpeed([], performance.now());
  }
}

async function poll() {
  for (;;) {
    await refresh();
    await new Promise((done) => setTimeout(done, POLL_MS));
  }
}

// ---- chat ----

function stuckToEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 80;
}

function follow(stuck) {
  if (!stuck) return;
  const log = $("log");
  log.scrollTop = log.scrollHeight;
  if (log.scrollHeight <= log.clientHeight) $("prompt").scrollIntoView({ block: "end" });
}

function addAnswer() {
  const node = element("div", undefined, "turn");
  const fold = element("details");
  fold.hidden = true;
  fold.append(element("summary", "Reasoning"), element("div"));
  const text = element("div", "", "text");
  const note = element("p", "waiting", "note");
  note.setAttribute("role", "status");
  node.append(fold, text, note);
  $("log").append(node);
  return { fold, reasoning: fold.lastChild, text, note };
}

async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const blocks = buffer.split("\n\n");
    buffer = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue;
      if (block === "data: [DONE]") return;
      yield JSON.parse(block.slice(6));
    }
  }
}

function apply(chunk, view, answer) {
  if (chunk.error) throw new Error(chunk.error.message);
  if (chunk.usage) answer.usage = chunk.usage;
  if (chunk.timings) answer.rate = chunk.timings.predicted_per_second;
  const choice = chunk.choices && chunk.choices[0];
  if (!choice) return;
  const stuck = stuckToEnd();
  if (choice.delta.reasoning_content) {
    view.fold.hidden = false;
    if (!view.reasoning.firstChild) view.note.textContent = "thinking";
    view.reasoning.append(choice.delta.reasoning_content);
  }
  if (choice.delta.content) {
    if (!answer.content) view.note.textContent = "answering";
    answer.content += choice.delta.content;
    view.text.append(choice.delta.content);
  }
  if (choice.finish_reason) answer.finish = choice.finish_reason;
  follow(stuck);
}

function summary(answer, seconds) {
  const tokens = answer.usage ? answer.usage.completion_tokens : 0;
  const cut = answer.finish === "length" ? ", cut at the token limit" : "";
  const rate = answer.rate ? `, ${answer.rate.toFixed(1)} tokens/s` : "";
  return `${count(tokens)} tokens in ${seconds.toFixed(1)} s${rate}${cut}`;
}

async function ask(body, view, answer) {
  const started = performance.now();
  const reply = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify(body),
    signal: running.signal,
  });
  if (!reply.ok) {
    const failure = await reply.json().catch(() => null);
    throw new Error(failure?.error?.message || `the server answered ${reply.status}`);
  }
  for await (const chunk of events(reply)) apply(chunk, view, answer);
  view.note.textContent = summary(answer, (performance.now() - started) / 1000);
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = Boolean(controller);
  $("stop").hidden = !controller;
  $("log").setAttribute("aria-busy", String(Boolean(controller)));
}

async function send() {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  $("hint").hidden = true;
  const conversation = turns; // "New chat" may replace it before the answer has ended
  conversation.push({ role: "user", content: text });
  $("log").append(element("div", text, "turn user"));
  const view = addAnswer();
  const answer = { content: "", finish: "", usage: null, rate: 0 };
  follow(true);
  setRunning(new AbortController());
  const thinking = $("thinking").checked;
  const body = { messages: conversation, stream: true, stream_options: { include_usage: true }, enable_thinking: thinking };
  try {
    await ask(body, view, answer);
  } catch (error) {
    const stopped = error.name === "AbortError";
    view.note.textContent = stopped ? "stopped" : error.message;
    view.note.classList.toggle("error", !stopped);
    if (!stopped && !answer.content && !$("prompt").value) $("prompt").value = text; // to be sent again
  } finally {
    setRunning(null);
    if (answer.content) conversation.push({ role: "assistant", content: answer.content });
    else conversation.pop(); // a question without an answer is no part of what comes next
    $("prompt").focus();
  }
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
$("stop").addEventListener("click", () => running && running.abort());
$("clear").addEventListener("click", () => {
  if (running) running.abort();
  turns = [];
  $("log").replaceChildren($("hint"));
  $("hint").hidden = false;
  $("prompt").focus();
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value;
  sessionStorage.setItem("glm53-key", key);
  $("key").value = "";
  refresh();
});

poll();
