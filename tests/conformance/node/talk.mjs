// Talks to the gateway with OpenAI's client for node and prints one JSON line a step; pytest judges them.
// Environment: BASE_URL, API_KEY, MODEL.
import OpenAI from "openai";

const { BASE_URL, API_KEY, MODEL } = process.env;
const client = new OpenAI({ baseURL: BASE_URL, apiKey: API_KEY, maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const chat = { model: MODEL, messages, temperature: 0 };
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    strict: true,
    parameters: {
      type: "object",
      properties: { city: { type: "string", maxLength: 20 }, unit: { enum: ["celsius", "fahrenheit"] } },
      required: ["city", "unit"],
      additionalProperties: false,
    },
  },
};
const schema = {
  type: "object",
  properties: { continent: { enum: ["Africa", "Asia", "Europe"] }, capital: { type: "boolean" } },
  required: ["continent", "capital"],
  additionalProperties: false,
};

async function failure(promise) {
  try {
    await promise;
  } catch (error) {
    const { status, code, param, message, requestID } = error;
    return { name: error.constructor.name, status, code, param, message, requestID };
  }
  return { name: "none" };
}

async function all(stream) {
  const items = [];
  for await (const item of await stream) items.push(item);
  return items;
}

const steps = {
  chat: () => client.chat.completions.create(chat),
  stream: () => all(client.chat.completions.create({ ...chat, stream: true })),
  stream_usage: () =>
    all(client.chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } })),
  completions: () =>
    client.completions.create({ model: MODEL, prompt: ["One, two,", "The sky is"], n: 2, max_tokens: 4 }),
  tool: () =>
    client.chat.completions.create({
      ...chat,
      max_tokens: 128,
      tools: [weather],
      tool_choice: { type: "function", function: { name: "get_weather" } },
    }),
  schema: () =>
    client.chat.completions.create({
      ...chat,
      max_tokens: 128,
      response_format: { type: "json_schema", json_schema: { name: "place", schema, strict: true } },
    }),
  models: () => all(client.models.list()),
  responses: () => client.responses.create({ model: MODEL, input: messages, temperature: 0, max_output_tokens: 32 }),
  responses_stream: () =>
    all(client.responses.create({ model: MODEL, input: messages, temperature: 0, max_output_tokens: 32, stream: true })),
  request_id: async () => ({ id: (await client.chat.completions.create({ ...chat, max_tokens: 1 }))._request_id }),
  wrong_key: () =>
    failure(new OpenAI({ baseURL: BASE_URL, apiKey: "sk-nobody", maxRetries: 0 }).chat.completions.create(chat)),
  unknown_model: () => failure(client.chat.completions.create({ ...chat, model: "no-such-model" })),
  too_long: () =>
    failure(client.chat.completions.create({ ...chat, messages: [{ role: "user", content: "word ".repeat(3000) }] })),
  embeddings: () => failure(client.embeddings.create({ model: MODEL, input: "hello" })),
};

for (const [step, run] of Object.entries(steps)) {
  const outcome = await run().then((result) => ({ result }), (error) => ({ error: String(error) }));
  console.log(JSON.stringify({ step, ...outcome }));
}
