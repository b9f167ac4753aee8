// Draws the dashboards of a folder to PNG files, against a live Prometheus.
//   node render.mjs '{"dashboards": DIR, "out": DIR, "prometheus": URL, "chromium": FILE, "start": S, "end": S,
//                     "note": TEXT, "shots": [{"uid": U, "theme": "dark", "width": 1600}, ...]}'
// Prints one JSON document: for each shot its file and what became of every panel. Exit code 1: something could not be drawn.
import { build } from 'esbuild';
import { createReadStream } from 'node:fs';
import { mkdir, mkdtemp, rm } from 'node:fs/promises';
import http from 'node:http';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { fileURLToPath } from 'node:url';
import { chromium } from 'playwright-core';

const here = path.dirname(fileURLToPath(import.meta.url));
const wanted = JSON.parse(process.argv[2]);
const TYPES = { '.js': 'text/javascript', '.css': 'text/css', '.svg': 'image/svg+xml', '.json': 'application/json' };
const HTML =
  '<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="/page.css"><div id="root"></div>' +
  '<script>window.__grafana_public_path__ = "/public/";</script><script type="module" src="/page.js"></script>';

async function bundle(folder) {
  await build({
    entryPoints: [path.join(here, 'src/page.tsx')],
    outdir: folder,
    bundle: true,
    format: 'esm',
    target: 'es2022',
    jsx: 'automatic',
    define: { 'process.env.NODE_ENV': '"production"', global: 'window' },
    alias: { 'react-custom-scrollbars-2': path.join(here, 'src/scrollbars.tsx') },
    loader: { '.svg': 'dataurl', '.png': 'dataurl', '.ttf': 'dataurl', '.woff': 'dataurl', '.woff2': 'dataurl' },
    logLevel: 'error',
  });
}

function proxied(request, response) {
  const target = new URL(wanted.prometheus.replace(/\/$/, '') + request.url.slice('/prometheus'.length));
  const onward = http.get(target, (answer) => {
    response.writeHead(answer.statusCode, { 'content-type': answer.headers['content-type'] ?? 'text/plain' });
    answer.pipe(response);
  });
  onward.on('error', (error) => {
    response.writeHead(502, { 'content-type': 'application/json' });
    response.end(JSON.stringify({ status: 'error', errorType: 'unreachable', error: error.message }));
  });
}

function serve(folder) {
  const roots = {
    '/dashboards/': path.resolve(wanted.dashboards),
    '/public/build/img/': path.join(here, 'node_modules/@grafana/ui/dist/public/img'),
    '/': folder,
  };
  const server = http.createServer((request, response) => {
    if (request.url.startsWith('/prometheus/')) {
      proxied(request, response);
      return;
    }
    const name = decodeURIComponent(new URL(request.url, 'http://localhost').pathname);
    if (name === '/') {
      response.writeHead(200, { 'content-type': 'text/html' });
      response.end(HTML);
      return;
    }
    const prefix = Object.keys(roots).find((one) => name.startsWith(one));
    const file = path.join(roots[prefix], path.normalize(`/${name.slice(prefix.length)}`));
    const stream = createReadStream(file);
    stream.on('open', () => {
      response.writeHead(200, { 'content-type': TYPES[path.extname(file)] ?? 'application/octet-stream' });
      stream.pipe(response);
    });
    stream.on('error', () => {
      response.writeHead(404);
      response.end();
    });
  });
  server.keepAliveTimeout = 120_000; // a busy machine must not lose a connection between two queries
  return new Promise((done) => server.listen(0, '127.0.0.1', () => done(server)));
}

async function shoot(browser, origin, { uid, theme, width }) {
  const page = await browser.newPage({ viewport: { width, height: 1000 } });
  const problems = [];
  page.on('pageerror', (error) => problems.push(error.message));
  const query = new URLSearchParams({ uid, theme, start: wanted.start, end: wanted.end, note: wanted.note ?? '' });
  await page.goto(`${origin}/?${query}`);
  await page.waitForFunction(() => window.report !== undefined, undefined, { timeout: 60_000 });
  const report = await page.evaluate(() => window.report);
  const file = path.join(wanted.out, `${uid}-${theme}-${width}.png`);
  if (!report.error) {
    await page.setViewportSize({ width, height: report.height });
    await page.waitForTimeout(300);
    await page.screenshot({ path: file });
  }
  await page.close();
  return { uid, theme, width, file, problems, ...report };
}

const folder = await mkdtemp(path.join(tmpdir(), 'dashboards-preview-'));
let server;
let browser;
try {
  await mkdir(wanted.out, { recursive: true });
  await bundle(folder);
  server = await serve(folder);
  browser = await chromium.launch({ executablePath: wanted.chromium, args: ['--no-sandbox', '--disable-gpu'] });
  const origin = `http://127.0.0.1:${server.address().port}`;
  const shots = [];
  for (const shot of wanted.shots) {
    shots.push(await shoot(browser, origin, shot));
  }
  console.log(JSON.stringify(shots));
  const bad = shots.some((shot) => shot.error || shot.problems.length || shot.panels.some((panel) => panel.error));
  process.exitCode = bad ? 1 : 0;
} finally {
  await browser?.close();
  server?.close();
  await rm(folder, { recursive: true, force: true });
}
