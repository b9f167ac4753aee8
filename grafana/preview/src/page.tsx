// One dashboard as a page: /?uid=...&start=...&end=...&theme=dark. Sets window.report when all of it is drawn.
import {
  applyFieldOverrides,
  createTheme,
  dateTime,
  type DataFrame,
  setTimeZoneResolver,
  transformDataFrame,
} from '@grafana/data';
import { GlobalStyles, PanelChrome, ThemeContext, useTheme2 } from '@grafana/ui';
import * as React from 'react';
import { createRoot } from 'react-dom/client';
import { lastValueFrom } from 'rxjs';

import { fieldConfigOf, registerTransformers, registryFor } from './fields';
import { Drawn, hasData } from './panels';
import { interpolate, labelValues, type Mark, marks as marksOf, type Range, run, stepFor } from './prometheus';

const CELL = 30;
const GAP = 8;
const EDGE = 16;

interface Loaded {
  panel: any;
  frames: DataFrame[];
  fieldConfig: any;
  error?: string;
}

function box(panel: any, width: number) {
  const column = (width - 2 * EDGE - 23 * GAP) / 24;
  const { x, y, w, h } = panel.gridPos;
  return {
    left: EDGE + x * (column + GAP),
    top: y * (CELL + GAP),
    width: w * column + (w - 1) * GAP,
    height: h * CELL + (h - 1) * GAP,
  };
}

async function load(panel: any, variables: Record<string, string>, range: Range, theme: any, width: number): Promise<Loaded> {
  const fieldConfig = fieldConfigOf(panel);
  const targets = (panel.targets ?? []).filter((target: any) => !target.hide);
  try {
    const step = Math.max(stepFor(range, panel.maxDataPoints ?? box(panel, width).width));
    const asked = targets.map((target: any) =>
      run(target, interpolate(target.expr, variables, range, step), range, step, targets.length > 1)
    );
    let frames = (await Promise.all(asked)).flat();
    if (panel.transformations?.length && frames.length) {
      frames = await lastValueFrom(transformDataFrame(panel.transformations, frames));
    }
    frames = applyFieldOverrides({
      data: frames,
      fieldConfig,
      fieldConfigRegistry: registryFor({ ...panel, fieldConfig }),
      replaceVariables: (text) => text,
      theme,
      timeZone: 'utc',
    });
    return { panel, frames, fieldConfig };
  } catch (error) {
    return { panel, frames: [], fieldConfig, error: String(error) };
  }
}

/** What each variable stands for in a query, and what its box shows. */
async function chosen(dashboard: any, range: Range): Promise<Array<{ name: string; label: string; query: string; shown: string }>> {
  return Promise.all(
    (dashboard.templating?.list ?? []).map(async (variable: any) => {
      const text = typeof variable.query === 'string' ? variable.query : variable.query?.query;
      const found = await labelValues(text, range);
      const all = variable.includeAll;
      return {
        name: variable.name,
        label: variable.label ?? variable.name,
        query: all ? (variable.allValue ?? `(${found.join('|')})`) : (found[0] ?? ''),
        shown: all ? 'All' : (found[0] ?? '–'),
      };
    })
  );
}

class Guard extends React.Component<{ id: number; children: React.ReactNode }, { error?: string }> {
  state = { error: undefined as string | undefined };

  static getDerivedStateFromError(error: unknown) {
    return { error: String(error) };
  }

  render() {
    return this.state.error ? <div className="no-data" data-error={this.state.error}>{this.state.error}</div> : this.props.children;
  }
}

function Header({ dashboard, shown, range, note }: any) {
  const time = (seconds: number) => new Date(seconds * 1000).toISOString().slice(0, 16).replace('T', ' ');
  return (
    <header>
      <h1>{dashboard.title}</h1>
      <div className="tools">
        {shown.map((one: any) => (
          <span key={one.name} className="box">
            <b>{one.label}</b> {one.shown}
          </span>
        ))}
        {(dashboard.links ?? []).map((link: any) => (
          <span key={link.title} className="box">
            {link.title}
          </span>
        ))}
        <span className="box right">
          {time(range.start)} to {time(range.end).slice(11)} UTC
        </span>
      </div>
      {note && <p className="note">{note}</p>}
    </header>
  );
}

function Page({ dashboard, loaded, shown, marks, range, width, note }: any) {
  const theme = useTheme2();
  const timeRange: any = {
    from: dateTime(range.start * 1000),
    to: dateTime(range.end * 1000),
    raw: { from: dateTime(range.start * 1000), to: dateTime(range.end * 1000) },
  };
  const bottom = Math.max(...dashboard.panels.map((panel: any) => box(panel, width).top + box(panel, width).height));
  const css = `
    body { background: ${theme.colors.background.canvas}; margin: 0; overflow: hidden; }
    header { padding: 12px ${EDGE}px 0; }
    header h1 { font-size: 18px; margin: 0 0 8px; }
    .tools { display: flex; gap: 8px; flex-wrap: wrap; }
    .box { border: 1px solid ${theme.colors.border.medium}; border-radius: 4px; padding: 3px 10px; font-size: 12px;
      background: ${theme.colors.background.primary}; }
    .box b { color: ${theme.colors.text.secondary}; font-weight: 500; padding-right: 4px; }
    .right { margin-left: auto; }
    .note { margin: 8px 0 0; font-size: 12px; color: ${theme.colors.warning.text}; }
    .grid { position: relative; margin-top: ${GAP}px; }
    .grid > div { position: absolute; }
    .heading { font-size: 16px; font-weight: 500; line-height: ${CELL}px; }
    .no-data { display: flex; height: 100%; align-items: center; justify-content: center; text-align: center;
      color: ${theme.colors.text.secondary}; font-size: 14px; }
  `;
  return (
    <>
      <style>{css}</style>
      <Header dashboard={dashboard} shown={shown} range={range} note={note} />
      <div className="grid" style={{ height: bottom + EDGE }}>
        {loaded.map(({ panel, frames, fieldConfig, error }: Loaded) => {
          const place = box(panel, width);
          if (panel.type === 'row') {
            return (
              <div key={panel.id} className="heading" style={place}>
                {panel.title}
              </div>
            );
          }
          return (
            <div key={panel.id} style={place} data-panel={panel.id}>
              <PanelChrome
                title={panel.title}
                description={panel.description}
                width={place.width}
                height={place.height}
                displayMode={panel.transparent ? 'transparent' : 'default'}
                statusMessage={error}
              >
                {(inner, tall) => (
                  <Guard id={panel.id}>
                    <Drawn
                      panel={panel}
                      fieldConfig={fieldConfig}
                      frames={frames}
                      timeRange={timeRange}
                      width={inner}
                      height={tall}
                      marks={marks}
                    />
                  </Guard>
                )}
              </PanelChrome>
            </div>
          );
        })}
      </div>
    </>
  );
}

/** Titles that do not fit, by panel. */
function cutTitles(): Record<string, boolean> {
  const cut: Record<string, boolean> = {};
  for (const one of document.querySelectorAll('[data-panel]')) {
    const title = one.querySelector('h2');
    if (title && title.scrollWidth > title.clientWidth + 1) {
      cut[one.getAttribute('data-panel')!] = true;
    }
  }
  return cut;
}

function failures(): Record<string, string> {
  const found: Record<string, string> = {};
  for (const one of document.querySelectorAll('[data-panel] [data-error]')) {
    found[one.closest('[data-panel]')!.getAttribute('data-panel')!] = one.getAttribute('data-error')!;
  }
  return found;
}

async function main() {
  const asked = new URLSearchParams(location.search);
  const range = { start: Number(asked.get('start')), end: Number(asked.get('end')) };
  const dashboard = await (await fetch(`/dashboards/${asked.get('uid')}.json`)).json();
  const theme = createTheme({ colors: { mode: asked.get('theme') === 'light' ? 'light' : 'dark' } });
  const width = window.innerWidth;
  setTimeZoneResolver(() => 'utc');
  registerTransformers();
  const shown = await chosen(dashboard, range);
  const variables = Object.fromEntries(shown.map((one) => [one.name, one.query]));
  const loaded = await Promise.all(dashboard.panels.map((panel: any) => load(panel, variables, range, theme, width)));
  const step = stepFor(range, 1000);
  const annotations = (dashboard.annotations?.list ?? []).filter((one: any) => one.expr ?? one.target?.expr);
  const marks: Mark[] = (
    await Promise.all(
      annotations.map((one: any) => marksOf(one, interpolate(one.expr ?? one.target.expr, variables, range, step), range, step))
    )
  ).flat();
  createRoot(document.getElementById('root')!).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <Page {...{ dashboard, loaded, shown, marks, range, width, note: asked.get('note') }} />
    </ThemeContext.Provider>
  );
  await document.fonts.ready;
  await new Promise((done) => setTimeout(done, 1500)); // plots draw themselves over several frames
  const broken = failures();
  const cut = cutTitles();
  (window as any).report = {
    height: document.documentElement.scrollHeight,
    marks: marks.length,
    panels: loaded
      .filter((one) => one.panel.type !== 'row')
      .map((one) => ({
        id: one.panel.id,
        title: one.panel.title,
        error: one.error ?? broken[one.panel.id] ?? null,
        empty: one.panel.type !== 'text' && !one.error && !hasData(one.frames),
        cutTitle: Boolean(cut[one.panel.id]),
      })),
  };
}

main().catch((error) => {
  (window as any).report = { error: String(error?.stack ?? error) };
});
