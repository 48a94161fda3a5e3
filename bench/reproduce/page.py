# SPDX-License-Identifier: Apache-2.0
"""The results of reproduce.py as charts, in the format that `dynmo report FILE --html OUT` makes a page of."""
import re

SETTING = ("The paper's settings are public only as far as its code is: GPT and BERT of 24 to 48 blocks, hidden size 1024, "
           "micro-batches of 2, 32 of them a step, 8 ranks. Of the paper only its six factors are quoted; each is an \"up to\".")
NAMES = ("A: dense, whole blocks evenly (Megatron's cut). Ah: dense, its best static cut. C: dynamic under A's cut. D: dynamic under "
         "Ah's cut, kept. A factor is the step time of the first over that of the second.")
KINDS = {"exact": "No clock decides these figures.", "measured": "Measured; judged on a quiet machine only."}
COLOURS = {"reached": "#4c78a8", "bound": "#888888", "paper, up to": "#e45756", "goal": "#ffbf00"}


def number(text):
    found = re.search(r"[0-9]+(?:\.[0-9]+)?", str(text or ""))
    return float(found.group()) if found else None


def figures_of(part, rows):
    """Title, note and rows of each figure of a part; rows that no figure names are in none."""
    for figure in part.get("figures", [{"title": "", "rows": ""}]):
        shown = [row for row in rows if re.search(figure["rows"], row["id"]) and "value" in row]
        if shown:
            yield figure["title"], figure.get("note", ""), shown


def label(name):
    """A row as a person reads it: "24 blocks: A to search", "128 ranks: A to search"."""
    for pattern, unit in ((r"end/[^/]+/([^/]+)/(.+)-([a-z]+)", "blocks"), (r"scale/([^/]+)/[^/]+/(.+)-([a-z]+)", "ranks")):
        found = re.fullmatch(pattern, name)
        if found:
            return f"{found.group(1)} {unit}: {found.group(2)} to {found.group(3)}"
    return name


def group(row):
    """Sorts by what is before the colon of a label, numbers by their value."""
    return [int(part) if part.isdigit() else part for part in re.split("([0-9]+)", label(row["id"]).split(":")[0])]


def table_of(rows):
    return [{"row": label(row["id"]), "id": row["id"], "value": row["value"], "low": row["spread"][0],
             "high": row["spread"][1], "bound": row.get("bound"), "paper": number(row.get("paper")), "goal": row.get("goal")}
            for row in sorted(rows, key=group)]


def layer(mark, field, name, **more):
    """Marks at the values of a field, of the rows that have one."""
    return {"transform": [{"filter": f"isValid(datum.{field})"}], "mark": {**mark, "tooltip": True},
            "encoding": {"x": {"field": field, "type": "quantitative", "title": None}, "color": {"datum": name}, **more}}


def chart(title, note, table, rows):
    """Bars of the values, marks of what they are compared with."""
    colour = {"type": "nominal", "title": None, "scale": {"domain": list(COLOURS), "range": list(COLOURS.values())}}
    layers = [layer({"type": "bar"}, "value", "reached"), layer({"type": "rule", "color": "black"}, "low", "reached", x2={"field": "high"}),
              layer({"type": "tick", "thickness": 3}, "bound", "bound"), layer({"type": "tick", "thickness": 3}, "goal", "goal"),
              layer({"type": "point", "shape": "diamond", "filled": True, "size": 90}, "paper", "paper, up to")]
    layers = [one for one in layers if any(row[one["encoding"]["x"]["field"]] is not None for row in rows)]
    for one in layers:
        one["data"] = {"name": table}
        one["encoding"]["color"] |= colour
        one["encoding"]["y"] = {"field": "row", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 400}}
    return {"title": title, "note": note, "tables": [table], "spec": {"height": 18 * len(rows), "layer": layers}}


def cells(row):
    low, high = row.get("spread", (None, None))
    return [row["id"], f"{row['value']:.4g}" if "value" in row else f"failed: {row['failed']}",
            f"{low:.4g} to {high:.4g}" if row.get("runs", 1) > 1 else "", f"{row['bound']:.4g}" if "bound" in row else "",
            str(row.get("paper", "")), str(row.get("goal") or "")]


def document(results, parts):
    charts, runs = [], []
    for name, rows in results["parts"].items():
        tables = {}
        for title, note, shown in figures_of(parts[name], rows):
            key = f"{name}/{len(tables)}"
            tables[key] = table_of(shown)
            charts.append(chart(title, note, key, tables[key]))
        runs.append({"name": f"{name}: {parts[name]['title']} {KINDS[parts[name]['kind']]}", "layers": [], "seconds": [], "tracks": [],
                     "tables": tables, "rows": [["row", "value", "spread", "bound", "paper", "goal"], *map(cells, rows)]})
    machine = results["machine"]
    made = (f"Commit {results['commit']}{', with changes' if results['dirty'] else ''}, {machine['cores']} x {machine['processor']}, "
            f"{machine['system']}; load average {results['load'][0]:.1f} before and {results['load'][1]:.1f} after.")
    return {"format": "dynmo-html-report-1", "title": "DynMo: the evaluation", "about": [SETTING, NAMES, made], "wide": True,
            "charts": charts, "runs": runs, "together": [], "all": {}}
