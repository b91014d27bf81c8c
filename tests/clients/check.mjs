// Clients of Node.js against a running server: `npm install openai @anthropic-ai/sdk ai
// @ai-sdk/openai-compatible`, then `node check.mjs URL MODEL`. As check.py does it for Python.
import Anthropic from "@anthropic-ai/sdk";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, streamText } from "ai";
import assert from "node:assert";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const root = url.replace(/\/(v1\/?)?$/, "");
const messages = [{ role: "user", content: "Paint the wall red." }];
const schema = {
  type: "object",
  properties: { colour: { type: "string", enum: ["red", "blue"] } },
  required: ["colour"],
  additionalProperties: false,
};
const tool = { type: "function", function: { name: "paint", parameters: schema } };
const isPainted = (found) => assert(["red", "blue"].includes(found.colour), JSON.stringify(found));

const CLIENTS = {
  async openai() {
    const client = new OpenAI({ baseURL: root + "/v1", apiKey: "none", maxRetries: 0 });
    const ask = { model, messages, temperature: 0, max_tokens: 100 };
    const said = await client.chat.completions.create({
      ...ask,
      tools: [tool],
      tool_choice: "required",
    });
    const message = said.choices[0].message;
    isPainted(JSON.parse(message.tool_calls[0].function.arguments));
    const done = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "done" };
    await client.chat.completions.create({
      ...ask,
      messages: [...messages, message, done],
      tools: [tool],
      max_tokens: 4,
    });
    const format = { type: "json_schema", json_schema: { name: "wall", strict: true, schema } };
    const parsed = await client.chat.completions.parse({ ...ask, response_format: format });
    isPainted(parsed.choices[0].message.parsed);
    let usage = null;
    const options = { stream: true, stream_options: { include_usage: true } };
    for await (const part of await client.chat.completions.create({ ...ask, ...options })) {
      usage = part.usage ?? usage;
    }
    assert(usage.completion_tokens > 0);
    const whole = client.chat.completions.stream(ask);
    assert((await whole.finalChatCompletion()).choices[0].finish_reason);
    await client.completions.create({ model, prompt: "def add(a,", max_tokens: 4, logprobs: 1 });
    const reply = { model, input: "hi", max_output_tokens: 4 };
    assert.equal((await client.responses.create(reply)).status, "incomplete");
    assert.equal((await client.responses.stream(reply).finalResponse()).status, "incomplete");
    assert.equal((await client.models.list()).data[0].id, model);
    const other = client.chat.completions.create({ model: "other", messages });
    await assert.rejects(other, OpenAI.NotFoundError);
  },

  async anthropic() {
    const client = new Anthropic({ baseURL: root, apiKey: "none", maxRetries: 0 });
    const ask = { model, max_tokens: 100, messages };
    const tools = [{ name: "paint", input_schema: schema }];
    const forced = { ...ask, tools, tool_choice: { type: "any", disable_parallel_tool_use: true } };
    const said = await client.messages.create(forced);
    const call = said.content.find((block) => block.type === "tool_use");
    isPainted(call.input);
    const done = { type: "tool_result", tool_use_id: call.id, content: "done" };
    const more = [
      ...messages,
      { role: "assistant", content: said.content },
      { role: "user", content: [done] },
    ];
    await client.messages.create({ ...ask, tools, messages: more, max_tokens: 4 });
    const streamed = await client.messages.stream(forced).finalMessage();
    isPainted(streamed.content.find((block) => block.type === "tool_use").input);
    assert((await client.messages.countTokens({ model, messages })).input_tokens > 4);
    await assert.rejects(client.messages.create({ ...ask, model: "other" }), Anthropic.NotFoundError);
  },

  async "ai sdk"() {
    const make = createOpenAICompatible({
      name: "llmjax",
      baseURL: root + "/v1",
      includeUsage: true,
      supportsStructuredOutputs: true,
    });
    const ask = { model: make(model), prompt: "Paint the wall red.", maxOutputTokens: 100 };
    assert((await generateText({ ...ask, maxOutputTokens: 4 })).usage.outputTokens > 0);
    const stream = streamText({ ...ask, maxOutputTokens: 4 });
    for await (const _ of stream.textStream);
    assert((await stream.usage).outputTokens > 0);
    isPainted((await generateObject({ ...ask, schema: jsonSchema(schema) })).object);
  },
};

for (const [name, check] of Object.entries(CLIENTS)) {
  try {
    await check();
    console.log("ok      " + name);
  } catch (error) {
    console.log("FAILED  " + name, error);
    process.exitCode = 1;
  }
}
