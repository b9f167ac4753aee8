// What @grafana/data needs to be told before it applies a dashboard's field configuration: every property it may find.
import {
  booleanOverrideProcessor,
  dataLinksOverrideProcessor,
  displayNameOverrideProcessor,
  FieldConfigOptionsRegistry,
  identityOverrideProcessor,
  numberOverrideProcessor,
  standardTransformers,
  standardTransformersRegistry,
  stringOverrideProcessor,
  thresholdsOverrideProcessor,
  unitOverrideProcessor,
  valueMappingsOverrideProcessor,
} from '@grafana/data';

const STANDARD: Record<string, any> = {
  unit: unitOverrideProcessor,
  min: numberOverrideProcessor,
  max: numberOverrideProcessor,
  decimals: numberOverrideProcessor,
  displayName: displayNameOverrideProcessor,
  color: identityOverrideProcessor,
  mappings: valueMappingsOverrideProcessor,
  noValue: stringOverrideProcessor,
  thresholds: thresholdsOverrideProcessor,
  links: dataLinksOverrideProcessor,
  description: stringOverrideProcessor,
  filterable: booleanOverrideProcessor,
  fieldMinMax: booleanOverrideProcessor,
};

/** The time series panel's own defaults, which its plugin would supply. */
export const TIME_SERIES_DEFAULTS = {
  drawStyle: 'line',
  lineInterpolation: 'linear',
  lineWidth: 1,
  fillOpacity: 0,
  gradientMode: 'none',
  showPoints: 'auto',
  pointSize: 5,
  spanNulls: false,
  axisPlacement: 'auto',
  axisLabel: '',
  scaleDistribution: { type: 'linear' },
  stacking: { mode: 'none', group: 'A' },
  thresholdsStyle: { mode: 'off' },
  hideFrom: { legend: false, tooltip: false, viz: false },
};

/** A registry with the standard properties and every `custom.*` one that this panel uses. */
export function registryFor(panel: any): FieldConfigOptionsRegistry {
  const custom = new Set(Object.keys(panel.fieldConfig?.defaults?.custom ?? {}));
  for (const override of panel.fieldConfig?.overrides ?? []) {
    for (const { id } of override.properties) {
      if (id.startsWith('custom.')) {
        custom.add(id.slice('custom.'.length));
      }
    }
  }
  const item = (id: string, path: string, process: any) => ({
    id,
    path,
    name: path,
    process,
    isCustom: id.startsWith('custom.'),
    shouldApply: (field: any) => field.type !== 'time',
    settings: {},
    override: () => null,
    editor: () => null,
  });
  const registry = new FieldConfigOptionsRegistry();
  for (const [id, process] of Object.entries(STANDARD)) {
    registry.register(item(id, id, process) as any);
  }
  for (const path of custom) {
    registry.register(item(`custom.${path}`, path, identityOverrideProcessor) as any);
  }
  return registry;
}

/** A panel's field configuration, ready to apply: defaults supplied, thresholds' open ends closed. */
export function fieldConfigOf(panel: any): any {
  const config = structuredClone(panel.fieldConfig ?? { defaults: {}, overrides: [] });
  config.overrides ??= [];
  config.defaults ??= {};
  if (panel.type === 'timeseries') {
    config.defaults.custom = { ...TIME_SERIES_DEFAULTS, ...config.defaults.custom };
  }
  const steps = [config.defaults, ...config.overrides.flatMap((one: any) => one.properties.map((p: any) => p.value))];
  for (const holder of steps) {
    const list = holder?.thresholds?.steps ?? holder?.steps;
    if (Array.isArray(list) && list.length && list[0].value == null) {
      list[0].value = -Infinity;
    }
  }
  return config;
}

export function registerTransformers(): void {
  const all = Object.values(standardTransformers).filter((one: any, i, list) => {
    return one?.id && list.findIndex((other: any) => other?.id === one.id) === i;
  });
  standardTransformersRegistry.setInit(() =>
    all.map((one: any) => ({ id: one.id, name: one.name, transformation: async () => one, editor: () => null }) as any)
  );
}
