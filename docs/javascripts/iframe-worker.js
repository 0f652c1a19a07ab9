// Browsers start no workers from file://. There the search runs in a hidden frame, so that
// the site can be searched from a disk.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inner = this.frame.contentWindow
      inner.document.open()  // or Firefox replaces the document later
      inner.document.write("<!doctype html><body></body>")
      inner.document.close()
      inner.postMessage = (data) =>
        this.dispatchEvent(new MessageEvent("message", { data }))
      this.loaded = new Promise((resolve) => {
        const script = inner.document.createElement("script")
        script.src = new URL(url, document.baseURI)
        script.onload = resolve
        inner.document.body.append(script)
      })
    }

    postMessage(data) {
      const message = new MessageEvent("message", { data })
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(message))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
