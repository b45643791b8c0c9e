// A page that was opened as a file may not start a worker. This gives the site's search a frame in place of one, so that it works
// without a server, and without a script from another address (mkdocs-material would take one, unless a file of this name is there).
"use strict";

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #waiting = [];

    constructor(url) {
      super();
      this.#frame.hidden = true;
      this.#frame.deliver = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.#frame.srcdoc = `<script>postMessage = (data) => frameElement.deliver(data);</script><script src="${url}"></script>`;
      this.#frame.addEventListener("load", () => {
        const waiting = this.#waiting;
        this.#waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      });
      document.body.append(this.#frame);
    }

    postMessage(data) {
      if (this.#waiting) this.#waiting.push(data);
      else this.#frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
