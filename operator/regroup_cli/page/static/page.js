// Tells the user when the command that serves the page does not answer. Everything else is htmx.
"use strict";
const gone = document.getElementById("gone");
for (const name of ["htmx:sendError", "htmx:responseError", "htmx:timeout"]) {
  document.addEventListener(name, () => { gone.hidden = false; });
}
document.addEventListener("htmx:afterOnLoad", () => { gone.hidden = true; });
