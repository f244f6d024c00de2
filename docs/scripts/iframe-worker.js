// Browsers start no worker from a file. If the site is opened without a server, its search runs in a hidden frame instead, with the interface of a Worker.
"use strict";

if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const page = this.frame.contentDocument;
      page.open();
      page.write(`<!doctype html><script src="${new URL(url, location)}"></script>`);
      page.close();
      page.querySelector("script").addEventListener("load", () => this.start());
    }

    start() {
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.postMessage = (data) => inside.dispatchEvent(new inside.MessageEvent("message", { data }));
      this.waiting.splice(0).forEach(this.postMessage);
    }

    postMessage(data) {
      this.waiting.push(data);
    }

    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
