// A request to the server. `poke` repeats it, at most once in `every_ms`.

import {empty, replace} from "./dom.js";

export class Feed {
  // `show` receives each answer; `container` shows an error.
  constructor(ask, show, container, every_ms = 2000) {
    Object.assign(this, {ask, show, container, every_ms, asked_at: -Infinity, closed: false, number: 0});
  }

  // `now`: the request has changed, so ignore the pending answer.
  poke(now = false) {
    if (this.closed) return;
    const left = now ? 0 : this.asked_at + this.every_ms - performance.now();
    if (now) this.number++;
    if (left > 0 || (this.busy && !now)) {
      this.timer ??= setTimeout(
        () => {
          this.timer = undefined;
          this.poke();
        },
        Math.max(left, 200),
      );
      return;
    }
    this.run(this.number);
  }

  async run(number) {
    this.busy = true;
    this.asked_at = performance.now();
    try {
      const value = await this.ask();
      if (!this.closed && number === this.number) this.show(value);
    } catch (error) {
      if (!this.closed && number === this.number)
        replace(this.container, empty("This cannot be shown now", String(error.message ?? error)));
    } finally {
      if (number === this.number) this.busy = false;
    }
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
  }
}
