// A value that others watch.

/** @template T */
export class Signal {
  /** @param {T} value */
  constructor(value) {
    this.value = value;
    /** @type {Set<(value: T) => void>} */
    this.watchers = new Set();
  }

  /** @param {T} value */
  set(value) {
    this.value = value;
    for (const watcher of this.watchers) watcher(value);
  }

  /**
   * Call a function now and with every new value, until the returned function is called.
   * @param {(value: T) => void} watcher
   */
  watch(watcher) {
    this.watchers.add(watcher);
    watcher(this.value);
    return () => this.watchers.delete(watcher);
  }
}
