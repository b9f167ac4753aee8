// Stands in for react-custom-scrollbars-2, whose CommonJS default export esbuild hands over as an object.
import * as React from 'react';

export const Scrollbars = React.forwardRef<HTMLDivElement, { children?: React.ReactNode }>(({ children }, ref) => (
  <div ref={ref} style={{ overflow: 'hidden', height: '100%' }}>
    {children}
  </div>
));
export default Scrollbars;
