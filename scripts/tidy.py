#!/usr/bin/env python3
"""Says where the code is not as it is to be: scripts/tidy.py [--rule NAME] [--crate NAME] [--summary]

Each violation is one line, `path:line: rule: what`, and the last line is the count of each rule. The exit status is 0 only if there is
none. --crate takes the name of the crate's folder, --summary prints the last line only.

The rules are about crates/*/src without its tests, except for file-length, which is about every Rust file of the workspace:

    arrows            a room of the core uses only what the table in crates/engine/src/lib.rs says, by path and by method
    engine-named      the core's Engine is named only by the loop and by the rooms above all others
    open-fields       fields are not open to the whole crate or to others, but in what crosses a boundary (the rooms api, status,
                      format and wire, and files and folders named api), in a number with a name (one field without one), and in the Engine, which engine-named keeps from all who are not parts of the loop
    watermarks        a mark of how far a volume is is moved by one method, which one file calls beside that of its own
    struct-size       a struct has at most 20 fields, but what is a list by nature: formats, status and counters
    parameters        a function has at most 5, `self` not counted; what a trait demands of an `impl` is the trait's affair
    function-length   a function has at most 70 lines of code, counted as clippy does: in its braces, without comments and blank lines;
                      more only if it is one `match` whose arms have no `if`, `match` or loop in them
    file-length       a file has at most 700 lines
    exceptions        at most 5 items may have #[expect(clippy::too_many_arguments, reason = "…")], too_many_lines or struct_…,
                      and are then left out of parameters, function-length or struct-size

A method counts as one of a room if other rooms can call it, and no other room and not the standard library has one of that name.
"""

import argparse
import os
import pathlib
import re
import sys
from collections import Counter, namedtuple

RULES = ["arrows", "engine-named", "open-fields", "watermarks", "struct-size", "parameters", "function-length", "file-length", "exceptions"]
FIELDS_MAX = 20
PARAMETERS_MAX = 5
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 700
EXCEPTIONS_MAX = 5

# Where the workspace has Rust files.
FOLDERS = ["crates", "tests", "bench", "fuzz"]
CORE = "engine"
# The room of lib.rs, which may use everything, and whose table says what the others may.
ROOT = "lib"
TABLE = "crates/engine/src/lib.rs"
# Rooms, or files at the top, that may name the Engine.
ENGINE_NAMED = {"engine", ROOT, "control", "recovery"}
# Crates whose fields are looked at, and where they may be open: in these rooms, and in files and
# folders named api anywhere.
OPEN_FIELDS_CRATES = {"engine", "replica", "daemon", "sim"}
OPEN_FIELDS_ROOMS = {"api", "status", "format", "wire"}
OPEN_FIELDS_PATH = re.compile(r"/api(\.rs$|/)")
OPEN_FIELDS_NAMES = ("Counters", "Status", "Spec", "Config", "Options", "Limits", "Report")
# What only parts of the loop can have.
LOOP = "Engine"
# What moves a mark, by the mark.
WATERMARKS = {
    "advance_built": "built",
    "advance_published": "published",
    "advance_durable": "durable",
    "advance_acknowledged": "acknowledged",
    "advance_drained": "drained",
    "advance_committed": "committed",
    "advance_sent": "sent",
}
# Rooms of the core, and the end of the name of a struct, that are lists by nature.
LIST_ROOMS = {"status", "format"}
LIST_NAME = "Counters"
EXCEPTION = re.compile(r"too_many_arguments|too_many_lines|struct_\w+")
# Methods that may as well be those of the standard library, or of the few crates that the core
# uses.
FOREIGN = set(
    """
    abs abs_diff all and and_then any append as_bytes as_deref as_deref_mut as_mut as_mut_ptr as_mut_slice as_ptr as_ref as_slice as_str
    back back_mut binary_search binary_search_by binary_search_by_key borrow borrow_mut by_ref bytes capacity chain chars checked_add
    checked_div checked_mul checked_sub chunks chunks_exact chunks_exact_mut chunks_mut clamp clear clone cloned cmp collect concat
    contains contains_key copied copy_from_slice copy_within count count_ones cycle dedup dedup_by_key default deref difference div_ceil
    drain entry enumerate eq err expect expect_err extend extend_from_slice fill filter filter_map finalize find find_map finish first
    first_key_value first_mut flat_map flatten fmt fold for_each front front_mut fuse ge get get_mut get_or_insert get_or_insert_with gt
    hash ilog2 index index_mut insert inspect intersection into into_inner into_iter into_values is_empty is_err is_multiple_of is_none
    is_none_or is_ok is_power_of_two is_some is_some_and is_sorted iter iter_mut join keys last last_key_value last_mut le leading_zeros
    len lines lock lt make_contiguous map map_err map_or map_or_else map_while max max_by max_by_key min min_by min_by_key modify ne next
    next_back next_multiple_of next_power_of_two nth ok ok_or ok_or_else or or_default or_else or_insert or_insert_with parse partial_cmp
    partition partition_point peek peekable pop pop_back pop_first pop_front pop_last position pow product push push_back push_front
    push_str range range_mut read read_from_bytes read_from_prefix rem_euclid remove replace reserve resize resize_with ret retain
    retain_mut rev reverse rfind rotate_left rotate_right rposition saturating_add saturating_mul saturating_sub scan set shrink_to
    shrink_to_fit skip skip_while sort sort_by sort_by_key sort_unstable sort_unstable_by sort_unstable_by_key splice split split_at
    split_at_mut split_first split_last split_off starts_with step_by sub sum swap swap_remove take take_while to_le_bytes to_owned
    to_string to_vec trailing_zeros trim truncate try_from try_into union unwrap unwrap_or unwrap_or_default unwrap_or_else unzip update
    values values_mut windows with wrapping_add wrapping_mul wrapping_sub write write_to zip
    """.split()
)

Token = namedtuple("Token", "kind text line last")
Violation = namedtuple("Violation", "rule path line what")

TOKEN = re.compile(
    r"""
    (?P<space> \s+ | //[^\n]* )
  | (?P<comment> /\* )
  | (?P<literal> [bc]?r(?P<hashes>\#*)"(?s:.*?)"(?P=hashes)
      | [bc]?"(?:[^"\\]|\\(?s:.))*"
      | b?'(?:\\(?:u\{[^}]*\}|x[0-9a-fA-F]{2}|.)|[^\\'\n])'
      | \d\w*(?:\.\d\w*)? )
  | (?P<lifetime> '[^\W\d]\w* )
  | (?P<ident> (?:r\#)?[^\W\d]\w* )
  | (?P<punct> ::|->|=>|. )
    """,
    re.X,
)
OPENING, CLOSING = {"(", "[", "{"}, {")", "]", "}"}
# What may stand between the attributes of an item and its keyword.
MODIFIERS = {"pub", "const", "async", "unsafe", "extern", "default"}
CONTROL_FLOW = {"if", "match", "for", "while", "loop"}


def tokens_of(text):
    """The tokens of a file. Comments are none, and a string, a character or a number is one, a `literal`."""
    tokens, at, line = [], 0, 1
    while at < len(text):
        found = TOKEN.match(text, at)
        end = found.end()
        if found.lastgroup == "comment":
            depth = 1
            while depth:
                edge = re.compile(r"/\*|\*/").search(text, end)
                if not edge:
                    raise ValueError(f"the comment of line {line} does not end")
                depth += 1 if edge.group() == "/*" else -1
                end = edge.end()
        lines = text.count("\n", at, end)
        if found.lastgroup not in ("space", "comment"):
            tokens.append(Token(found.lastgroup, found.group(), line, line + lines))
        at, line = end, line + lines
    return tokens


class Tokens:
    """Tokens, and the partner of each bracket. An index outside of them is that of an empty token."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.partner, opened = {}, []
        for i, token in enumerate(tokens):
            if token.text in OPENING:
                opened.append(i)
            elif token.text in CLOSING:
                if not opened:
                    raise ValueError(f"a bracket too many in line {token.line}")
                self.partner[i] = opened.pop()
                self.partner[self.partner[i]] = i
        if opened:
            raise ValueError(f"the bracket of line {tokens[opened[-1]].line} is not closed")

    def text(self, i):
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""

    def is_ident(self, i):
        return 0 <= i < len(self.tokens) and self.tokens[i].kind == "ident"

    def find(self, i, wanted):
        """The first of the wanted tokens from `i` on that is not in brackets, or the end of what `i` is in."""
        while i < len(self.tokens) and self.text(i) not in wanted and self.text(i) not in CLOSING:
            i = self.partner[i] + 1 if self.text(i) in OPENING else i + 1
        return i

    def past_generics(self, i):
        depth = 0
        while self.text(i) == "<" or depth:
            depth += {"<": 1, ">": -1}.get(self.text(i), 0)
            i = self.partner[i] + 1 if self.text(i) in OPENING else i + 1
        return i

    def parts(self, opening):
        """What stands in brackets, split at its commas: first index of each part, and the one behind it."""
        found, begin, depth, i, end = [], opening + 1, 0, opening + 1, self.partner[opening]
        while i < end:
            if self.text(i) in OPENING:
                i = self.partner[i]
            elif self.text(i) == "," and depth == 0:
                found.append((begin, i))
                begin = i + 1
            else:
                depth += {"<": 1, ">": -1}.get(self.text(i), 0)
            i += 1
        return found + [(begin, end)] if begin < end else found

    def attribute(self, i):
        """The opening bracket of the attribute that begins at `i`, if one does."""
        bracket = i + 2 if self.text(i + 1) == "!" else i + 1
        return bracket if self.text(i) == "#" and self.text(bracket) == "[" else None

    def past_attributes(self, i):
        while (bracket := self.attribute(i)) is not None:
            i = self.partner[bracket] + 1
        return i

    def head(self, keyword):
        """Where the item begins whose keyword stands there, without its attributes."""
        i = keyword
        while True:
            before = self.text(i - 1)
            if before in MODIFIERS or self.text(i - 2) == "extern" and before.endswith('"'):
                i -= 1
            elif before == ")" and self.text(self.partner[i - 1] - 1) == "pub":
                i = self.partner[i - 1] - 1
            else:
                return i

    def attributes(self, keyword):
        """The opening brackets of the attributes of an item."""
        i, found = self.head(keyword), []
        while self.text(i - 1) == "]" and self.text(self.partner[i - 1] - 1) == "#":
            found.append(self.partner[i - 1])
            i = self.partner[i - 1] - 1
        return found

    def visibility(self, i):
        """`pub` and the words in the brackets behind it, or nothing."""
        if self.text(i) != "pub":
            return []
        if self.text(i + 1) == "(" and self.text(i + 2) in ("crate", "super", "self", "in"):
            return ["pub"] + [self.text(j) for j in range(i + 2, self.partner[i + 1])]
        return ["pub"]

    def past_item(self, i):
        """Behind the item, field, arm or statement that begins at `i` with its attributes."""
        i = self.past_attributes(i)
        while self.text(i) in MODIFIERS and not (self.text(i) == "const" and self.text(i + 2) == ":"):
            i = self.partner[i + 1] + 1 if len(self.visibility(i)) > 1 else i + 1
            i += self.text(i).endswith('"')
        if self.text(i) in ("use", "const", "static", "let", "type"):
            return self.find(i, {";"}) + 1
        if self.text(i) in ("fn", "mod", "impl", "struct", "enum", "union", "trait", "macro_rules", "{"):
            i = self.find(i, {"{", ";"})
            return self.partner[i] + 1 if self.text(i) == "{" else i + 1
        depth = 0
        while i < len(self.tokens) and self.text(i) not in CLOSING:
            if self.text(i) == ";" or self.text(i) == "," and depth <= 0:
                return i + 1
            depth += {"<": 1, ">": -1}.get(self.text(i), 0)
            i = self.partner[i] + 1 if self.text(i) in OPENING else i + 1
        return i

    def lines(self, first, end):
        """In how many lines these tokens stand."""
        return len({line for token in self.tokens[first:end] for line in range(token.line, token.last + 1)})


def without_tests(tokens):
    """The tokens without what only tests have, and the names of modules in files of their own that only tests have."""
    kept, modules, i = [], set(), 0
    while i < len(tokens.tokens):
        bracket = tokens.attribute(i)
        attribute = "" if bracket is None else "".join(tokens.text(j) for j in range(bracket + 1, tokens.partner[bracket]))
        if attribute in ("test", "cfg(test)") or attribute.startswith("cfg(all(test,") or (tokens.text(i), tokens.text(i + 1)) == ("mod", "tests"):
            end = tokens.past_item(i)
            if tokens.text(end - 3) == "mod" and tokens.text(end - 1) == ";":
                modules.add(tokens.text(end - 2))
            i = end
        else:
            kept.append(tokens.tokens[i])
            i += 1
    return Tokens(kept), modules


Function = namedtuple("Function", "name at line parameters body owner")
Struct = namedtuple("Struct", "name at line fields")
Block = namedtuple("Block", "kind end name")


class Source:
    """A file of crates/*/src, with what it declares and uses."""

    def __init__(self, path, text):
        self.path, self.crate = path, path.split("/")[1]
        self.module = path.removesuffix(".rs").removesuffix("/mod").split("/")[3:]
        self.module = [] if self.module in (["lib"], ["main"]) else self.module
        self.room = self.module[0] if self.module else ROOT
        self.tokens, names = without_tests(Tokens(tokens_of(text)))
        self.test_modules = [self.module + [name] for name in names]
        self.functions, self.structs = [], []
        # Full paths with the lines where they stand, names of methods that are called, and all
        # `use` of the file, by name.
        self.paths, self.calls, self.imports = [], [], {}
        self.blocks = []
        for i, token in enumerate(self.tokens.tokens):
            while self.blocks and i > self.blocks[-1].end:
                self.blocks.pop()
            if token.kind == "ident":
                self.read(i, token)

    def read(self, i, token):
        tokens, word, following = self.tokens, token.text, self.tokens.text(i + 1)
        if word == "fn" and tokens.is_ident(i + 1):
            self.read_function(i, token)
        elif word in ("struct", "union") and tokens.is_ident(i + 1) and (word == "struct" or tokens.text(i + 2) in ("{", "<")):
            opening = tokens.past_generics(i + 2)
            opening = opening if tokens.text(opening) == "(" else tokens.find(opening, {"{", ";"})
            fields = tokens.parts(opening) if tokens.text(opening) in OPENING else []
            self.structs.append(Struct(following, i, token.line, fields))
        elif word == "impl" and (tokens.text(i - 1) in ("", "}", ";", "{", "]", ")", "unsafe") or tokens.text(i - 2) == "$"):
            opening = tokens.find(tokens.past_generics(i + 1), {"{", ";"})
            of_trait = any(tokens.text(j) == "for" and tokens.text(j + 1) != "<" for j in range(i, opening))
            self.open_block("impl of trait" if of_trait else "impl", opening)
        elif word in ("trait", "mod") and tokens.is_ident(i + 1):
            self.open_block(word, tokens.find(i, {"{", ";"}), following)
        elif word == "extern" and tokens.text(i + 2) == "{":
            self.open_block(word, i + 2)
        elif word in ("crate", "super", "self") and following == "::" and tokens.text(i - 1) not in ("::", "in"):
            module = self.module + [block.name for block in self.blocks if block.kind == "mod"]
            self.paths += [(path, line) for path, _, line in self.leaves(i, module)]
        elif word == "use" and tokens.text(i - 1) != "+":
            self.imports |= {name: path for path, name, _ in self.leaves(i + 1, [])}
        elif tokens.text(i - 1) == "." or (tokens.text(i - 2), tokens.text(i - 1)) == ("Self", "::"):
            if following == "(" or following == "::" and tokens.text(i + 2) == "<":
                self.calls.append((word, token.line))

    def read_function(self, i, token):
        tokens = self.tokens
        opening = tokens.past_generics(i + 2)
        if tokens.text(opening) != "(":
            return
        parameters = tokens.parts(opening)
        if parameters:
            first = [tokens.text(j) for j in range(tokens.past_attributes(parameters[0][0]), parameters[0][1])]
            first = [word for word in first if word not in ("&", "mut") and not word.startswith("'")]
            parameters = parameters[1:] if first[:1] == ["self"] else parameters
        body = tokens.find(tokens.partner[opening] + 1, {"{", ";"})
        owner = self.blocks[-1].kind if self.blocks else None
        body = body if tokens.text(body) == "{" else None
        self.functions.append(Function(tokens.text(i + 1), i, token.line, len(parameters), body, owner))
        if body is not None:
            self.open_block("fn", body)

    def open_block(self, kind, opening, name=None):
        if self.tokens.text(opening) == "{":
            self.blocks.append(Block(kind, self.tokens.partner[opening], name))

    def leaves(self, i, path):
        """What a path, or a tree of a `use`, at `i` stands for: full path, name here and line of each."""
        tokens, word = self.tokens, self.tokens.text(i)
        if word == "::":
            return self.leaves(i + 1, path)
        if word == "{":
            return [leaf for begin, _ in tokens.parts(i) for leaf in self.leaves(begin, path)]
        path = [] if word == "crate" else path[:-1] if word == "super" else path if word == "self" else path + [word]
        if tokens.text(i + 1) == "::" and (tokens.is_ident(i + 2) or tokens.text(i + 2) in ("{", "*")):
            return self.leaves(i + 2, path)
        name = tokens.text(i + 2) if tokens.text(i + 1) == "as" else path[-1] if path else ""
        return [(path, name, tokens.tokens[i].line)]

    def exceptions(self, bracket):
        """The rules of clippy that the attribute at this bracket switches off as an exception, and whether it says why."""
        tokens = self.tokens
        if tokens.text(bracket + 1) != "expect":
            return [], False
        inside = range(bracket, tokens.partner[bracket])
        lints = [tokens.text(j + 2) for j in inside if tokens.text(j) == "clippy" and EXCEPTION.fullmatch(tokens.text(j + 2))]
        return lints, any(tokens.text(j) == "reason" for j in inside)

    def excused(self, item, lint):
        exceptions = [self.exceptions(bracket) for bracket in self.tokens.attributes(item.at)]
        return any(reason and any(found.startswith(lint) for found in lints) for lints, reason in exceptions)

    def is_flat_match(self, body):
        """Whether a function is one `match` whose arms only do one thing after the other."""
        tokens = self.tokens
        arms = tokens.find(body + 1, {"{"})
        if tokens.text(body + 1) != "match" or tokens.partner.get(arms) != tokens.partner[body] - 1:
            return False
        i, end = arms + 1, tokens.partner[arms]
        while i < end:
            begin = tokens.find(i, {"=>"}) + 1
            i = tokens.partner[begin] + 1 if tokens.text(begin) == "{" else tokens.find(begin, {","})
            if any(tokens.text(j) in CONTROL_FLOW for j in range(begin, i)):
                return False
            i += tokens.text(i) == ","
        return True

    def visible_elsewhere(self, function):
        """Whether other rooms can call a method."""
        visibility = self.tokens.visibility(self.tokens.head(function.at))
        return visibility in (["pub"], ["pub", "crate"]) or visibility == ["pub", "super"] and len(self.module) < 2


class Rooms:
    """The table of the core's rooms, which stands in the documentation of the crate."""

    def __init__(self, text):
        rows = [re.split(r"(?<!\\)\|", line.removeprefix("//!").strip())[1:-1] for line in text.splitlines() if line.startswith("//! |")]
        # What each room may use, with the line of its row.
        self.may_use, self.lines, self.wrong = {}, {}, []
        cells = [(name, cells[-1]) for cells in rows if len(cells) == 3 and (name := re.search(r"`(\w+)`", cells[0]))]
        names = [name.group(1) for name, _ in cells]
        everybodys = [name for name, (_, uses) in zip(names, cells) if "everybody above may use it" in uses]
        for name, (_, uses) in zip(names, cells):
            self.lines[name] = next(i for i, line in enumerate(text.splitlines(), 1) if line.startswith("//! |") and f"`{name}`" in line)
            above = re.search(r"everything above(?: `(\w+)`)?", uses)
            allowed = set(re.findall(r"`(\w+)`", uses))
            if above:
                allowed = set(names[: names.index(above.group(1) or name)])
            elif "everything" in uses:
                allowed = set(names)
            self.wrong += [(self.lines[name], f"{name} may use {other}, which is no room") for other in sorted(allowed - set(names))]
            below = names[: names.index(name)]
            self.may_use[name] = (allowed | {other for other in everybodys if other in below}) - {name}
        self.wrong += [(self.lines[name], f"the table goes in a circle: {' → '.join(circle)}") for name, circle in self.circles()]

    def circles(self):
        """Each circle of the table, once."""
        found, done = [], set()

        def walk(name, way):
            if name in way:
                found.append((name, way[way.index(name) :] + [name]))
            elif name not in done:
                for other in sorted(self.may_use.get(name, ())):
                    walk(other, way + [name])
                done.add(name)

        for name in self.may_use:
            walk(name, [])
        return found

    def allows(self, room, other):
        return room in (other, ROOT) or other in self.may_use.get(room, ())


def arrows(sources, text):
    """What the rooms of the core use and may not."""
    core = [source for source in sources if source.crate == CORE]
    rooms = Rooms(text)
    found = [Violation("arrows", TABLE, line, what) for line, what in rooms.wrong]
    there = {source.room for source in core} - {ROOT}
    found += [Violation("arrows", TABLE, 1, f"the room {room} is not in the table") for room in sorted(there - set(rooms.may_use))]
    found += [Violation("arrows", TABLE, rooms.lines[room], f"there is no room {room}") for room in rooms.may_use if room not in there]
    exports = next((source.imports for source in core if source.path == TABLE), {})

    def room_of(path):
        first = path[0] if path else ROOT
        if first in there:
            return first
        return room_of(exports[first]) if first in exports and exports[first][:1] != [first] else ROOT

    # Rooms by method, those that others can call and all, and the methods of traits from elsewhere.
    callable_in, declared_in, of_traits = {}, {}, set()
    for source in core:
        for function in source.functions:
            if function.owner in ("impl", "trait"):
                declared_in.setdefault(function.name, set()).add(source.room)
                if function.owner == "trait" or source.visible_elsewhere(function):
                    callable_in.setdefault(function.name, set()).add(source.room)
            elif function.owner == "impl of trait":
                of_traits.add(function.name)
    for source in core:
        used = {}
        for path, line in source.paths:
            other = room_of(path)
            # Control and recovery are parts of the loop: each has an impl of the core.
            is_part = source.room in ENGINE_NAMED and tuple(path) == ("engine", "Engine")
            if not rooms.allows(source.room, other) and not is_part:
                used.setdefault((line, other), []).append("::".join(path))
        for name, line in source.calls:
            candidates = callable_in.get(name, set())
            if len(candidates) == 1 and source.room not in declared_in[name] and name not in FOREIGN | of_traits:
                (other,) = candidates
                if not rooms.allows(source.room, other):
                    used.setdefault((line, other), []).append(f".{name}()")
        for (line, other), names in used.items():
            found.append(Violation("arrows", source.path, line, f"{source.room} uses {other}: {', '.join(dict.fromkeys(names))}"))
    return found


def engine_named(source):
    if source.crate == CORE and source.room not in ENGINE_NAMED:
        for line in sorted({token.line for token in source.tokens.tokens if token.text == "Engine"}):
            yield Violation("engine-named", source.path, line, f"{source.room} names Engine")


def open_fields(source):
    is_boundary = source.room in OPEN_FIELDS_ROOMS or OPEN_FIELDS_PATH.search(source.path)
    if source.crate not in OPEN_FIELDS_CRATES or is_boundary:
        return
    tokens = source.tokens
    for struct in source.structs:
        if struct.name.endswith(OPEN_FIELDS_NAMES) or source.crate == CORE and struct.name == LOOP:
            continue
        for number, (begin, _) in enumerate(struct.fields):
            begin = tokens.past_attributes(begin)
            visibility = tokens.visibility(begin)
            # What is above a room of the core is the crate.
            is_crate = visibility == ["pub", "super"] and source.crate == CORE and len(source.module) == 1
            if is_crate or visibility in (["pub"], ["pub", "crate"], ["pub", "in", "crate"]):
                at = begin + 1 if len(visibility) == 1 else tokens.partner[begin + 1] + 1
                name = tokens.text(at) if tokens.text(at + 1) == ":" else number
                if name == number and len(struct.fields) == 1:
                    continue
                shown = "pub" if len(visibility) == 1 else "pub(crate)"
                yield Violation("open-fields", source.path, tokens.tokens[begin].line, f"{struct.name}.{name} is {shown}")


def watermarks(sources):
    """Marks that several methods move, or that several files have moved, or no one."""
    core = [source for source in sources if source.crate == CORE]
    for method, mark in WATERMARKS.items():
        declared = [(source, function.line) for source in core for function in source.functions if function.name == method]
        if len(declared) != 1:
            places = ", ".join(f"{source.path}:{line}" for source, line in declared) or "nowhere"
            yield Violation("watermarks", declared[0][0].path if declared else TABLE, 1, f"what moves the mark {mark} is one method {method}, not: {places}")
            continue
        ((own, line),) = declared
        callers = {source.path: line for source in core for name, line in reversed(source.calls) if name == method}
        callers = sorted(item for item in callers.items() if item[0] != own.path or len(callers) == 1)
        if not callers:
            yield Violation("watermarks", own.path, line, f"nobody moves the mark {mark} by {method}")
        for path, at in callers[1:]:
            yield Violation("watermarks", path, at, f"the mark {mark} is moved in {callers[0][0]} as well")


def sizes(source):
    """What is too large in a file."""
    for struct in source.structs:
        is_list = source.crate == CORE and source.room in LIST_ROOMS or struct.name.endswith(LIST_NAME)
        if len(struct.fields) > FIELDS_MAX and not is_list and not source.excused(struct, "struct_"):
            what = f"{struct.name} has {len(struct.fields)} fields, and at most {FIELDS_MAX} are allowed"
            yield Violation("struct-size", source.path, struct.line, what)
    for function in source.functions:
        if (
            function.parameters > PARAMETERS_MAX
            and function.owner not in ("impl of trait", "extern")
            and not source.excused(function, "too_many_arguments")
        ):
            what = f"{function.name} has {function.parameters} parameters, and at most {PARAMETERS_MAX} are allowed"
            yield Violation("parameters", source.path, function.line, what)
        if function.body is not None:
            lines = source.tokens.lines(function.body + 1, source.tokens.partner[function.body])
            if lines > FUNCTION_LINES_MAX and not source.is_flat_match(function.body) and not source.excused(function, "too_many_lines"):
                what = f"{function.name} has {lines} lines of code, and at most {FUNCTION_LINES_MAX} are allowed"
                yield Violation("function-length", source.path, function.line, what)


def exceptions(sources):
    there = []
    for source in sources:
        for i, token in enumerate(source.tokens.tokens):
            bracket = source.tokens.attribute(i)
            lints, reason = source.exceptions(bracket) if bracket is not None else ([], False)
            if lints and not reason:
                yield Violation("exceptions", source.path, token.line, f"{', '.join(lints)} has no reason")
            there += [(source.path, token.line, lint) for lint in lints]
    if len(there) > EXCEPTIONS_MAX:
        for path, line, lint in there:
            yield Violation("exceptions", path, line, f"{lint} is one of {len(there)} exceptions, and at most {EXCEPTIONS_MAX} are allowed")


def check(files):
    """All violations in files, which are texts by path."""
    found = []
    for path, text in files.items():
        lines = text.count("\n")
        if lines > FILE_LINES_MAX:
            found.append(Violation("file-length", path, lines, f"{lines} lines, and at most {FILE_LINES_MAX} are allowed"))
    sources = []
    for path, text in files.items():
        folders = path.removesuffix(".rs").split("/")
        if folders[0] == "crates" and folders[2] == "src" and "tests" not in folders:
            try:
                sources.append(Source(path, text))
            except ValueError as error:
                sys.exit(f"{path}: {error}")
    tests = [(source.crate, module) for source in sources for module in source.test_modules]
    sources = [source for source in sources if not any(source.crate == crate and source.module[: len(module)] == module for crate, module in tests)]
    if TABLE in files:
        found += [*arrows(sources, files[TABLE]), *watermarks(sources)]
    for source in sources:
        found += [*engine_named(source), *open_fields(source), *sizes(source)]
    found += exceptions(sources)
    return sorted(found, key=lambda violation: (RULES.index(violation.rule), violation.path, violation.line, violation.what))


def main():
    parser = argparse.ArgumentParser(description="Says where the code is not as it is to be.", allow_abbrev=False)
    parser.add_argument("--rule", choices=RULES, help="only this rule")
    parser.add_argument("--crate", help="only the crate in this folder")
    parser.add_argument("--summary", action="store_true", help="only the counts")
    options = parser.parse_args()
    paths = sorted(str(path) for folder in FOLDERS for path in pathlib.Path(folder).rglob("*.rs"))
    crate_of = lambda path: path.split("/")[1 if path.startswith("crates/") else 0]
    if options.crate and options.crate not in map(crate_of, paths):
        sys.exit(f"there is no crate {options.crate}")
    found = check({path: pathlib.Path(path).read_text() for path in paths})
    found = [violation for violation in found if options.rule in (None, violation.rule) and options.crate in (None, crate_of(violation.path))]
    if not options.summary:
        for violation in found:
            print(f"{violation.path}:{violation.line}: {violation.rule}: {violation.what}")
    counts = Counter(violation.rule for violation in found)
    print(", ".join(f"{counts[rule]} {rule}" for rule in RULES if options.rule in (None, rule)))
    return 1 if found else 0


if __name__ == "__main__":
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    sys.exit(main())
