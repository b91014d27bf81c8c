"use strict";
// Lists what /openapi.json says: routes, and the fields that each takes.

const byId = (id) => document.getElementById(id);
let key = sessionStorage.getItem("key");

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function resolve(schema, schemas) {
  return schema.$ref ? schemas[schema.$ref.split("/").at(-1)] : schema;
}

// What a value may be, in a few words.
function words(schema) {
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.anyOf) return [...new Set(schema.anyOf.map(words))].filter((w) => w !== "null").join(", or ");
  const kinds = [schema.type ?? "anything"].flat().filter((kind) => kind !== "null");
  const bounds = [
    ["from", schema.minimum], ["above", schema.exclusiveMinimum], ["up to", schema.maximum],
  ].filter(([, bound]) => bound !== undefined).map(([word, bound]) => `${word} ${bound}`);
  const items = schema.type?.includes?.("array") && schema.items ? ` of ${words(schema.items)}s` : "";
  return [kinds.join(" or ") + items, ...bounds].join(" ") || "null";
}

function fields(schema) {
  const table = make("table"), body = make("tbody");
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const row = make("tr");
    const needed = schema.required?.includes(name) ? " (required)" : "";
    const otherwise = field.default === undefined ? "" : ` [${JSON.stringify(field.default)}]`;
    row.append(make("td", name + needed), make("td", words(field) + otherwise));
    body.append(row);
  }
  table.append(body);
  const wide = make("div", undefined, "wide");
  wide.append(table);
  return wide;
}

function route(path, method, told, schemas) {
  const box = make("details", undefined, "said");
  const summary = make("summary");
  summary.append(make("b", `${method.toUpperCase()} ${path}`), ` ${told.summary}`);
  box.append(summary);
  const asked = Object.values(told.requestBody?.content ?? {})[0]?.schema;
  const schema = asked && resolve(asked, schemas);
  for (const one of schema ? schema.anyOf ?? [schema] : []) box.append(make("h2", "takes"), fields(one));
  const given = told.responses["200"].content["application/json"]?.schema;
  if (given) box.append(make("h2", "gives"), fields(resolve(given, schemas)));
  return box;
}

async function show() {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch("/openapi.json", { headers });
  byId("login").hidden = response.status !== 401;
  if (!response.ok) return;
  const api = await response.json();
  byId("about").textContent = `${api.info.description} Version ${api.info.version}.`;
  byId("routes").replaceChildren();
  for (const [path, methods] of Object.entries(api.paths))
    for (const [method, told] of Object.entries(methods))
      byId("routes").append(route(path, method, told, api.components.schemas));
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value;
  sessionStorage.setItem("key", key);
  show();
});

show();
