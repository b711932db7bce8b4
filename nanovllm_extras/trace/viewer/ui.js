// preact with htm: components are functions, and html`…` makes their elements, without a build step.

const { h, render, createContext } = preact;
const { useState, useEffect, useErrorBoundary, useLayoutEffect, useMemo, useRef, useContext, useCallback } = preactHooks;
const html = htm.bind(h);

// The context that every component can read: {t, theme, choice: {seq, block}, choose, showSource}
const View = createContext(null);
const useView = () => useContext(View);

// Return a ref for an element and the element's current width in CSS pixels.
function useWidth() {
  const ref = useRef(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(ref.current);
    return () => observer.disconnect();
  }, []);
  return [ref, width];
}

// Return `value` once it has not changed for 100 ms, so that what is slow to draw does not follow each step of a scrub.
function useSettled(value) {
  const [settled, setSettled] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(value), 100);
    return () => clearTimeout(timer);
  }, [value]);
  return settled;
}

// Give a canvas width × height CSS pixels, sharp on any screen. Its size is set only if it changed: setting it clears it.
function fitCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const size = [Math.round(width * ratio), Math.round(height * ratio)];
  const isNew = canvas.width !== size[0] || canvas.height !== size[1];
  if (isNew) [canvas.width, canvas.height] = size;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return { context, isNew };
}

function formatTime(microseconds) {
  if (microseconds === null || microseconds === undefined) return "–";
  if (microseconds < 1000) return `${Math.round(microseconds)} µs`;
  if (microseconds < 1e6) return `${(microseconds / 1000).toPrecision(3)} ms`;
  return `${(microseconds / 1e6).toPrecision(3)} s`;
}

// Show line breaks and empty texts.
const visible = (text) => text.replace(/\n/g, "⏎").replace(/^$/, "∅");

export { html, render, useState, useEffect, useErrorBoundary, useLayoutEffect, useMemo, useRef, useCallback, View, useView, useWidth, useSettled, fitCanvas, formatTime, visible };
