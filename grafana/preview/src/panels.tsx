// The panel types our dashboards use, drawn with Grafana's components as its own panel plugins do.
import {
  cacheFieldDisplayNames,
  type DataFrame,
  FieldType,
  getDisplayValueAlignmentFactors,
  getFieldDisplayValues,
  type GrafanaTheme2,
  renderMarkdown,
  type TimeRange,
  VizOrientation,
} from '@grafana/data';
import { BarGauge, BigValue, TimeSeries, type UPlotConfigBuilder, useTheme2, VizRepeater } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import * as React from 'react';

import { type Mark } from './prometheus';

interface Props {
  panel: any;
  fieldConfig: any;
  frames: DataFrame[];
  timeRange: TimeRange;
  width: number;
  height: number;
  marks: Mark[];
}

function Marks({ builder, marks, theme }: { builder: UPlotConfigBuilder; marks: Mark[]; theme: GrafanaTheme2 }) {
  React.useLayoutEffect(() => {
    builder.addHook('draw', (plot) => {
      const { ctx, bbox } = plot;
      ctx.save();
      for (const mark of marks) {
        const x = plot.valToPos(mark.time, 'x', true);
        if (x < bbox.left || x > bbox.left + bbox.width) {
          continue;
        }
        ctx.strokeStyle = ctx.fillStyle = theme.visualization.getColorByName(mark.color);
        ctx.setLineDash([5, 5]);
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
        ctx.beginPath();
        ctx.moveTo(x - 5, bbox.top + bbox.height + 6);
        ctx.lineTo(x + 5, bbox.top + bbox.height + 6);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.fill();
      }
      ctx.restore();
    });
  }, [builder]);
  return null;
}

function TimeSeriesPanel({ panel, frames, timeRange, width, height, marks }: Props) {
  const theme = useTheme2();
  return (
    <TimeSeries
      frames={frames}
      structureRev={1}
      width={width}
      height={height}
      timeRange={timeRange}
      timeZone="utc"
      legend={panel.options.legend}
      options={panel.options}
    >
      {(builder) => <Marks builder={builder} marks={marks} theme={theme} />}
    </TimeSeries>
  );
}

function values({ panel, fieldConfig, frames }: Props, theme: GrafanaTheme2, sparkline: boolean) {
  return getFieldDisplayValues({
    fieldConfig,
    reduceOptions: panel.options.reduceOptions,
    replaceVariables: (text) => text,
    theme,
    data: frames,
    sparkline,
    timeZone: 'utc',
  });
}

function orientationOf(panel: any): VizOrientation {
  return panel.options.orientation ?? VizOrientation.Auto;
}

function StatPanel(props: Props) {
  const theme = useTheme2();
  const { panel, width, height } = props;
  const { options } = panel;
  return (
    <VizRepeater
      getValues={() => values(props, theme, options.graphMode !== 'none')}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      renderValue={(one) => (
        <BigValue
          value={one.value.display}
          count={one.count}
          sparkline={one.value.sparkline}
          colorMode={options.colorMode}
          graphMode={options.graphMode}
          justifyMode={options.justifyMode}
          textMode={options.textMode}
          alignmentFactors={one.alignmentFactors}
          parentOrientation={one.orientation}
          text={options.text}
          width={one.width}
          height={one.height}
          theme={theme}
          wideLayout={options.wideLayout ?? true}
        />
      )}
      width={width}
      height={height}
      source={props.frames}
      itemSpacing={3}
      renderCounter={1}
      autoGrid={true}
      orientation={orientationOf(panel)}
    />
  );
}

function BarGaugePanel(props: Props) {
  const theme = useTheme2();
  const { panel, width, height } = props;
  const { options } = panel;
  return (
    <VizRepeater
      getValues={() => values(props, theme, false)}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      renderValue={(one) => (
        <BarGauge
          value={one.value.display}
          width={one.width}
          height={one.height}
          orientation={one.orientation}
          field={one.value.field}
          text={options.text}
          display={one.value.view?.getFieldDisplayProcessor(one.value.colIndex!)}
          theme={theme}
          itemSpacing={8}
          displayMode={options.displayMode}
          alignmentFactors={one.count > 1 ? one.alignmentFactors : undefined}
          showUnfilled={options.showUnfilled}
          valueDisplayMode={options.valueMode}
          namePlacement={options.namePlacement}
        />
      )}
      source={props.frames}
      width={width}
      height={height}
      itemSpacing={8}
      renderCounter={1}
      minVizWidth={options.minVizWidth ?? 8}
      minVizHeight={options.minVizHeight ?? 16}
      maxVizHeight={options.sizing === 'manual' ? options.maxVizHeight : 300}
      orientation={orientationOf(panel)}
    />
  );
}

function TablePanel({ panel, frames, width, height, timeRange }: Props) {
  const frame = frames[0];
  cacheFieldDisplayNames(frames);
  return (
    <TableNG
      data={frame}
      width={width}
      height={height}
      timeRange={timeRange}
      sortBy={panel.options.sortBy}
      cellHeight={panel.options.cellHeight}
      noHeader={panel.options.showHeader === false}
      structureRev={1}
      enableVirtualization={false}
      fieldConfig={panel.fieldConfig}
    />
  );
}

function TextPanel({ panel }: { panel: any }) {
  return <div className="markdown-html" dangerouslySetInnerHTML={{ __html: renderMarkdown(panel.options.content) }} />;
}

const DRAWN: Record<string, React.FunctionComponent<Props>> = {
  timeseries: TimeSeriesPanel,
  stat: StatPanel,
  bargauge: BarGaugePanel,
  table: TablePanel,
};

export function hasData(frames: DataFrame[]): boolean {
  return frames.some((frame) =>
    frame.fields.some((field) => field.type !== FieldType.time && field.values.some((value) => value != null))
  );
}

export function Drawn(props: Props) {
  if (props.panel.type === 'text') {
    return <TextPanel panel={props.panel} />;
  }
  const noValue = props.panel.fieldConfig?.defaults?.noValue;
  if (!hasData(props.frames)) {
    return <div className="no-data">{noValue ?? 'No data'}</div>;
  }
  const Panel = DRAWN[props.panel.type];
  if (!Panel) {
    throw new Error(`the preview cannot draw a ${props.panel.type}`);
  }
  return <Panel {...props} />;
}
