"use strict";
// A chat with the model behind this server. What it says is put in as text, never as HTML.

const byId = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const KEPT = [...NUMBERS, "system", "stop", "schema"];
const talk = []; // {role, content}
let key = sessionStorage.getItem("key");
let model = null; // null: not known yet
let halt = null; // ends the answer that is coming

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function headers() {
  const given = { "Content-Type": "application/json" };
  if (key) given.Authorization = `Bearer ${key}`;
  return given;
}

async function failure(response) {
  const body = await response.json().catch(() => null);
  return new Error(body?.error?.message ?? `the server answered ${response.status}`);
}

// Who is there

async function greet() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (response.status === 401) {
    byId("refused").hidden = !key;
    byId("login").hidden = false;
    byId("board").hidden = true;
    return;
  }
  byId("login").hidden = true;
  byId("board").hidden = false;
  if (response.status === 503) {
    byId("model").textContent = "is loading";
    setTimeout(greet, 1000);
    return;
  }
  if (!response.ok) throw await failure(response);
  model = (await response.json()).data[0].id;
  byId("model").textContent = model;
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value;
  sessionStorage.setItem("key", key);
  greet();
});

// What is asked for

function request() {
  const system = byId("system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...talk] : [...talk];
  const body = { model, messages, stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) {
    const text = byId(name).value.trim();
    if (text) body[name] = Number(text);
  }
  if (byId("stop").value) body.stop = byId("stop").value;
  if (byId("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: 3 });
  const schema = byId("schema").value.trim();
  if (schema) {
    const json_schema = { name: "answer", schema: parsed(schema) };
    body.response_format = { type: "json_schema", json_schema };
  }
  return body;
}

function parsed(schema) {
  try {
    return JSON.parse(schema);
  } catch (error) {
    throw new Error(`The JSON schema is no JSON: ${error.message}`);
  }
}

// The answer, as it comes

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function tokens(content) {
  return content.map((token) => {
    const span = make("span", token.token, "token");
    const share = Math.exp(token.logprob);
    span.style.background = `hsl(${Math.round(120 * share)} 70% 75%)`;
    const others = (token.top_logprobs ?? []).map(
      (other) => `${JSON.stringify(other.token)} ${(100 * Math.exp(other.logprob)).toFixed(1)}%`,
    );
    span.title = [`${(100 * share).toFixed(1)}%`, ...others].join("\n");
    return span;
  });
}

function bubble(role, text) {
  const box = make("div", undefined, `said ${role}`);
  const words = make("p", text);
  box.append(make("h2", role === "user" ? "you" : model), words);
  byId("talk").append(box);
  box.scrollIntoView({ block: "end" });
  return { box, words };
}

async function answer() {
  const { box, words } = bubble("assistant", "");
  const began = performance.now();
  let first = null, last = began, usage = null, reason = null;
  const said = { role: "assistant", content: "" };
  halt = new AbortController();
  busy(true);
  try {
    const body = JSON.stringify(request());
    const response = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body, signal: halt.signal });
    if (response.status === 401) greet();
    if (!response.ok) throw await failure(response);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      if (!choice) continue;
      const text = choice.delta.content ?? "", thought = choice.delta.reasoning ?? "";
      if (choice.logprobs?.content?.length) words.append(...tokens(choice.logprobs.content));
      else words.append(...(thought ? [make("span", thought, "quiet")] : []), text);
      if (text || thought) {
        last = performance.now();
        first ??= last;
      }
      said.content += text;
      reason = choice.finish_reason ?? reason;
      box.scrollIntoView({ block: "end" });
    }
  } catch (error) {
    if (error.name === "AbortError") {
      reason = "stopped";
    } else {
      box.classList.add("failed");
      box.append(make("p", error.message));
    }
  } finally {
    halt = null;
    busy(false);
  }
  if (said.content) talk.push(said);
  tell(box, { usage, reason, wait: (first ?? last) - began, rest: last - (first ?? last) });
}

function tell(box, { usage, reason, wait, rest }) {
  const parts = [];
  if (usage) {
    const count = usage.completion_tokens;
    parts.push(`${count} tokens`);
    if (count > 1 && rest > 0) byId("speed").textContent = `${((1000 * (count - 1)) / rest).toFixed(1)} tokens/s`;
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`prompt of ${usage.prompt_tokens}${cached ? `, ${cached} from the cache` : ""}`);
    parts.push(`first after ${(wait / 1000).toFixed(2)} s`);
  }
  if (reason && reason !== "stop") parts.push(reason === "length" ? "cut at the most tokens" : reason);
  if (parts.length) box.append(make("p", parts.join(" · "), "quiet"));
}

function busy(is) {
  byId("send").disabled = is;
  byId("halt").hidden = !is;
  byId("again").hidden = is || !talk.length;
}

// What people do

byId("say").addEventListener("submit", (event) => {
  event.preventDefault();
  const content = byId("text").value.trim();
  if (!content || halt || model === null) return;
  byId("text").value = "";
  talk.push({ role: "user", content });
  bubble("user", content);
  answer();
});

byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("say").requestSubmit();
  }
});

byId("halt").addEventListener("click", () => halt?.abort());

byId("again").addEventListener("click", () => {
  if (halt) return;
  if (talk.at(-1)?.role === "assistant") talk.pop();
  const boxes = byId("talk").querySelectorAll(".said.assistant");
  if (boxes.length && byId("talk").lastElementChild === boxes[boxes.length - 1]) boxes[boxes.length - 1].remove();
  answer();
});

byId("clear").addEventListener("click", () => {
  halt?.abort();
  talk.length = 0;
  byId("talk").replaceChildren();
  byId("speed").textContent = "";
  busy(false);
});

for (const name of KEPT) {
  byId(name).value = sessionStorage.getItem(`set ${name}`) ?? byId(name).value;
  byId(name).addEventListener("change", () => sessionStorage.setItem(`set ${name}`, byId(name).value));
}

greet();
