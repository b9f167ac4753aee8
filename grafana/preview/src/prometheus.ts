// Prometheus over HTTP, as Grafana's data source asks it, and its answers as data frames.
import { createDataFrame, type DataFrame, FieldType, type Labels } from '@grafana/data';

export interface Range {
  start: number; // seconds since 1970
  end: number;
}

interface Target {
  refId: string;
  expr: string;
  legendFormat?: string;
  instant?: boolean;
  format?: 'table' | 'time_series' | 'heatmap';
}

interface Result {
  metric: Labels;
  value?: [number, string];
  values?: Array<[number, string]>;
}

const SCRAPE_S = 5; // the data source's timeInterval
const STEPS = [5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400];

async function ask(path: string, parameters: Record<string, string>): Promise<any> {
  const url = `/prometheus/api/v1/${path}?${new URLSearchParams(parameters)}`;
  // Chromium drops what is on its way whenever an interface of the machine comes or goes, as containers' do.
  const answer = await fetch(url).catch(() => fetch(url));
  const body = await answer.json();
  if (body.status !== 'success') {
    throw new Error(`${body.errorType}: ${body.error}`);
  }
  return body.data;
}

/** Grafana's step for a panel so many pixels wide. */
export function stepFor(range: Range, pixels: number): number {
  const wanted = (range.end - range.start) / Math.max(pixels, 1);
  return STEPS.find((step) => step >= wanted) ?? STEPS[STEPS.length - 1];
}

function duration(seconds: number): string {
  return seconds % 60 === 0 ? `${seconds / 60}m` : `${seconds}s`;
}

/** `text` with the dashboard's variables and Grafana's built-in intervals put in. */
export function interpolate(text: string, variables: Record<string, string>, range: Range, step: number): string {
  const builtIn: Record<string, string> = {
    __rate_interval: duration(Math.max(step + SCRAPE_S, 4 * SCRAPE_S)),
    __interval: duration(step),
    __range: duration(Math.round(range.end - range.start)),
  };
  return text.replace(/\$(?:\{(\w+)(?::\w+)?\}|(\w+))/g, (whole, braced, bare) => {
    const name = braced ?? bare;
    return builtIn[name] ?? variables[name] ?? whole;
  });
}

/** The values of a `label_values(metric, label)` query. */
export async function labelValues(query: string, range: Range): Promise<string[]> {
  const found = /^label_values\((.+),\s*(\w+)\)$/.exec(query);
  if (!found) {
    throw new Error(`not a label_values query: ${query}`);
  }
  return ask(`label/${found[2]}/values`, { 'match[]': found[1], start: `${range.start}`, end: `${range.end}` });
}

function named(target: Target, labels: Labels): string {
  const format = target.legendFormat ?? '';
  if (format === '' || format === '__auto') {
    const shown = Object.entries(labels).filter(([name]) => name !== '__name__');
    return shown.length ? `{${shown.map(([name, value]) => `${name}="${value}"`).join(', ')}}` : target.expr;
  }
  return format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? '');
}

function series(target: Target, labels: Labels, times: number[], values: Array<number | null>): DataFrame {
  const { __name__: _, ...kept } = labels;
  return createDataFrame({
    refId: target.refId,
    fields: [
      { name: 'Time', type: FieldType.time, config: {}, values: times },
      { name: 'Value', type: FieldType.number, labels: kept, config: { displayNameFromDS: named(target, labels) }, values },
    ],
  });
}

function table(target: Target, results: Result[], several: boolean): DataFrame {
  const labels = [...new Set(results.flatMap((one) => Object.keys(one.metric)))].sort();
  return createDataFrame({
    refId: target.refId,
    fields: [
      { name: 'Time', type: FieldType.time, config: {}, values: results.map((one) => one.value![0] * 1000) },
      ...labels.map((label) => ({
        name: label,
        type: FieldType.string,
        config: {},
        values: results.map((one) => one.metric[label] ?? ''),
      })),
      {
        name: several ? `Value #${target.refId}` : 'Value',
        type: FieldType.number,
        config: {},
        values: results.map((one) => Number(one.value![1])),
      },
    ],
  });
}

/** What one target of a panel gives: a frame a series, or one table. */
export async function run(target: Target, expr: string, range: Range, step: number, several: boolean): Promise<DataFrame[]> {
  if (target.instant) {
    const { result } = await ask('query', { query: expr, time: `${range.end}` });
    if (target.format === 'table') {
      return result.length ? [table(target, result, several)] : [];
    }
    return result.map((one: Result) => series(target, one.metric, [one.value![0] * 1000], [Number(one.value![1])]));
  }
  const start = Math.floor(range.start / step) * step;
  const end = Math.floor(range.end / step) * step;
  const { result } = await ask('query_range', { query: expr, start: `${start}`, end: `${end}`, step: `${step}` });
  const times = Array.from({ length: Math.round((end - start) / step) + 1 }, (_, i) => (start + i * step) * 1000);
  return result.map((one: Result) => {
    const at = new Map(one.values!.map(([time, value]) => [Math.round(time * 1000), Number(value)]));
    return series(target, one.metric, times, times.map((time) => at.get(time) ?? null)); // gaps are nulls, not jumps
  });
}

export interface Mark {
  time: number; // milliseconds
  title: string;
  color: string;
}

/** Where an annotation's query begins to give a series: one mark for each run of points. */
export async function marks(annotation: any, expr: string, range: Range, step: number): Promise<Mark[]> {
  const { result } = await ask('query_range', {
    query: expr,
    start: `${Math.floor(range.start / step) * step}`,
    end: `${range.end}`,
    step: `${step}`,
  });
  return result.flatMap((one: Result) =>
    one
      .values!.filter(([time], i, all) => i === 0 || time - all[i - 1][0] > step * 1.5)
      .map(([time]) => ({ time: time * 1000, title: annotation.name, color: annotation.iconColor }))
  );
}
