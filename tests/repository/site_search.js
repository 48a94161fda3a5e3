// SPDX-License-Identifier: Apache-2.0
// Prints the pages that the search of a site finds for the words given, best last. Run in the folder of the site, without a browser:
// the scripts of search.html run one after another, and the page has no elements.
const fs = require("fs"), vm = require("vm");
const page = {
  document: { documentElement: { dataset: { content_root: "./" } }, readyState: "loading", addEventListener() {},
              getElementById: () => null, querySelector: () => null },
  window: { location: { search: "" }, addEventListener() {} }, localStorage: { setItem() {} }, URL, console, setTimeout };
Object.defineProperty(page, "Stemmer", { get: () => page.window.Stemmer });
vm.createContext(page);
for (const file of ["documentation_options", "doctools", "sphinx_highlight", "searchtools", "language_data"])
  vm.runInContext(fs.readFileSync(`_static/${file}.js`, "utf8"), page);
vm.runInContext(fs.readFileSync("searchindex.js", "utf8"), page);
page.words = process.argv[2];
const find = "Search._performSearch(...Search._parseQuery(words)).map((found) => found[0])";
console.log(JSON.stringify(vm.runInContext(find, page)));
