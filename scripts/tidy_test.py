#!/usr/bin/env python3
"""Whether scripts/tidy.py sees what it is there for, and nothing else."""

import os
import sys
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import tidy

LIB = """//! The core.
//!
//! | room | what it is about | may use |
//! |---|---|---|
//! | [`api`] | both ways | nothing; everybody above may use it |
//! | [`format`](mod@format) | bytes | nothing |
//! | `log` | records | `format` |
//! | `front` | clients | `format`, `log` |
//! | `drain` | to the image | `format`, `log` |
//! | `control` | volumes | everything above |
//! | `recovery` | no core yet | everything above `control` |
//! | `engine` | the loop | everything |

pub use engine::{Engine, EngineConfig as Config};
pub use front::{edge, read::deep};
"""
ROOMS = {f"crates/engine/src/{room}.rs": "" for room in ("api", "format", "log", "front", "drain", "control", "recovery", "engine")}
# What moves each mark, and who has it moved.
MOVERS = "impl Marks { " + " ".join(f"pub(crate) fn {method}(&mut self) {{}}" for method in tidy.WATERMARKS) + " }"
MOVED = "fn f() {\n" + "\n".join(f"marks.{method}();" for method in tidy.WATERMARKS) + "\n}"


def said(files, rule):
    """What is said of files by a rule, as `file:line what`."""
    return [f"{found.path.split('src/')[-1]}:{found.line} {found.what}" for found in tidy.check(files) if found.rule == rule]


def core(files, lib=LIB):
    """The core, with some of its files."""
    return ROOMS | {"crates/engine/src/lib.rs": lib} | {f"crates/engine/src/{path}": text for path, text in files.items()}


def crate(text, name="lab"):
    return {f"crates/{name}/src/some.rs": text}


def lines(number):
    return "    one();\n" * number


class Lexer(unittest.TestCase):
    def texts(self, text):
        return [token.text for token in tidy.tokens_of(text)]

    def test_comments_are_left_out_and_may_be_nested(self):
        self.assertEqual(self.texts("a /* { /* } */ ' \" */ b // { c\n/// {\nd"), ["a", "b", "d"])

    def test_a_literal_is_one_token_whatever_is_in_it(self):
        for literal in ('"{ // \\" }"', 'r"\\"', 'r##"a "# { b"##', 'b"{"', 'br#"""#', "'{'", "'\\''", "'\"'", "b'\\\\'", "'\\u{7d}'", "'é'", 'c"{"'):
            self.assertEqual(self.texts(f"x({literal})"), ["x", "(", literal, ")"])

    def test_a_lifetime_is_no_character(self):
        self.assertEqual(self.texts("&'a x, 'b': '_>"), ["&", "'a", "x", ",", "'b'", ":", "'_", ">"])

    def test_numbers_ranges_and_raw_names(self):
        self.assertEqual(self.texts("0..5 1.max(2) 1.5e3 r#type"), ["0", ".", ".", "5", "1", ".", "max", "(", "2", ")", "1.5e3", "r#type"])

    def test_lines_are_counted_through_comments_and_literals(self):
        tokens = tidy.tokens_of('/* \n */ "\n\n" a')
        self.assertEqual([(token.line, token.last) for token in tokens], [(2, 4), (4, 4)])

    def test_what_does_not_end_is_refused(self):
        for text in ("/* /* */", "fn f() {", "}"):
            self.assertRaises(ValueError, lambda: tidy.Tokens(tidy.tokens_of(text)))


class Tests(unittest.TestCase):
    """What only tests have is not looked at."""

    def test_modules_files_and_items(self):
        engine = "use crate::Engine;\n"
        for text in (
            "mod tests { " + engine + "}",
            "#[cfg(test)]\nmod any { mod inner { " + engine + "} }",
            "#[test]\n#[ignore]\npub fn a() -> Vec<Engine> { Engine }",
            "#[cfg(test)]\nuse crate::{Engine, api::{self}};",
            "#[cfg(test)]\npub(crate) const A: Engine = Engine { a: 1 };",
            "struct A {\n#[cfg(test)]\npub(super) b: Map<Engine, Engine>,\n}",
            "#[cfg(test)]\nimpl Engine { fn a() {} }",
            "#[cfg(test)]\npub struct A(Engine);",
            "fn f() {\n#[cfg(test)]\nEngine::call(1, 2);\n}",
        ):
            self.assertEqual(said(core({"log.rs": text}), "engine-named"), [], text)
            self.assertEqual(said(core({"log.rs": text + "\nfn f(_: Engine) {}"}), "engine-named"), [f"log.rs:{text.count(chr(10)) + 2} log names Engine"])
        self.assertEqual(said(core({"log/tests.rs": engine, "log/tests/more.rs": engine}), "engine-named"), [])
        self.assertEqual(said(core({"log.rs": "#[cfg(test)]\nmod check;", "log/check.rs": engine}), "engine-named"), [])
        self.assertEqual(len(said(core({"log.rs": "#[cfg(not(test))]\nmod check;", "log/check.rs": engine}), "engine-named")), 1)


class Arrows(unittest.TestCase):
    def test_paths(self):
        for path, text, other in (
            ("log.rs", "use crate::front::Read;", "front: front::Read"),
            ("log.rs", "use crate::{format::{self, a}, front::{Read, r::{A as B, *}}};", "front: front::Read, front::r::A, front::r::*"),
            ("log/a/b.rs", "fn f() { super::super::super::front::f::<u8>(); }", "front: front::f"),
            ("log/mod.rs", "mod a { use super::super::front::Read; }", "front: front::Read"),
            ("log.rs", "use crate::{api::A, edge};", "front: edge"),
            ("log.rs", "use crate::Config;", "engine: Config"),
            ("log.rs", "use crate::deep::X;", "front: deep::X"),
            ("log.rs", "use crate::*;", "lib: *"),
            ("log.rs", "macro_rules! m { () => { $crate::front::f() }; }", "front: front::f"),
            ("api.rs", "use crate::format::A;", "format: format::A"),
            ("recovery.rs", "use crate::control::A;", "control: control::A"),
        ):
            room = path.split("/")[0].removesuffix(".rs")
            files = core({path: text})
            if path == "log/mod.rs":
                del files["crates/engine/src/log.rs"]
            self.assertEqual(said(files, "arrows")[0], f"{path}:1 {room} uses {other}", text)

    def test_what_is_allowed(self):
        for path, text in (
            ("log.rs", "use crate::{api::A, format::*}; use std::front::A; use super::log::A; pub(in crate::front) fn f() {}"),
            ("log/a.rs", "use super::b; use self::front::A; fn front() { let front = front::a(); }"),
            ("log.rs", '// crate::front\nconst A: &str = "crate::front::A"; const B: &str = r#"use crate::front;"#;'),
            ("control.rs", "use crate::{log, drain, front::read::A};"),
            ("engine.rs", "use crate::{control, recovery};"),
            ("lib.rs", LIB + "use crate::engine::A;"),
        ):
            self.assertEqual(said(core({path: text}), "arrows"), [], text)

    def test_methods(self):
        called = {"log.rs": "impl<'a, T: Fn() -> A> Log<'a, T> { fn f(&self) {\n self.answer(1); } }"}
        for declared in ("impl Engine { pub(crate) fn answer(&self) {} }", "impl<T> A<T> { pub fn answer<U>(&self) {} }", "trait A { fn answer(&self); }"):
            self.assertEqual(said(core(called | {"front.rs": declared}), "arrows"), ["log.rs:2 log uses front: .answer()"], declared)
        called_otherwise = {"log.rs": "impl Log { fn f() { Self::answer::<u8>(); } }"}
        self.assertEqual(len(said(core(called_otherwise | {"front.rs": "impl A { pub fn answer() {} }"}), "arrows")), 1)

    def test_methods_that_may_be_others(self):
        called = "fn f() { a.answer(); a.push(); a.field; answer(); }"
        for files in (
            # Its own, or that of a room that it may use.
            {"front.rs": "impl A { pub fn answer() {} }", "log.rs": called + "impl B { fn answer() {} }"},
            {"format.rs": "impl A { pub fn answer() {} }", "log.rs": called},
            # One of two rooms; the other may be the one.
            {"front.rs": "impl A { pub fn answer() {} }", "format.rs": "impl A { pub fn answer() {} }", "log.rs": called},
            # Other rooms cannot call it.
            {"front.rs": "impl A { fn answer() {} }", "log.rs": called},
            {"front/a.rs": "impl A { pub(super) fn answer() {} }", "log.rs": called},
            # No method, one of a trait from elsewhere, or one of the standard library.
            {"front.rs": "pub fn answer() {}", "log.rs": called},
            {"front.rs": "impl A { pub fn answer() {} } impl Other for A { fn answer() {} }", "log.rs": called},
            {"front.rs": "impl A { pub fn push() {} }", "log.rs": called},
        ):
            self.assertEqual(said(core(files), "arrows"), [], files)

    def test_what_everybody_above_may_use_nobody_below_may(self):
        shared = LIB.replace("bytes | nothing", "bytes | nothing; everybody above may use it")
        for path in ("log.rs", "drain.rs", "recovery.rs"):
            self.assertEqual(said(core({path: "use crate::{api::A, format::B};"}, shared), "arrows"), [])
        self.assertEqual(said(core({"format.rs": "use crate::api::A;"}, shared), "arrows"), [])
        self.assertEqual(said(core({"api.rs": "use crate::format::A;"}, shared), "arrows"), ["api.rs:1 api uses format: format::A"])

    def test_the_table(self):
        changed = lambda old, new: said(core({}, LIB.replace(old, new)), "arrows")
        self.assertEqual(changed("bytes | nothing", "bytes | `log`"), ["lib.rs:6 the table goes in a circle: format → log → format"])
        self.assertEqual(changed("records | `format`", "records | `formats`"), ["lib.rs:7 log may use formats, which is no room"])
        self.assertEqual(changed("//! | `drain` | to the image | `format`, `log` |\n", ""), ["lib.rs:1 the room drain is not in the table"])
        self.assertEqual(changed("//! | `engine`", "//! | `more` | | nothing |\n//! | `engine`"), ["lib.rs:12 there is no room more"])


class EngineNamed(unittest.TestCase):
    def test_where(self):
        for path in ("engine.rs", "control/a.rs", "recovery/a/b.rs", "lib.rs"):
            self.assertEqual(said(core({path: "use crate::Engine;"}), "engine-named"), [])
        self.assertEqual(said(core({"log/a.rs": "fn a() {}\nimpl Engine {}"}), "engine-named"), ["log/a.rs:2 log names Engine"])
        self.assertEqual(said(core({"log.rs": '/// Engine\nfn f(_: EngineConfig) { "Engine"; }'}), "engine-named"), [])
        self.assertEqual(said(crate("fn f(_: Engine) {}"), "engine-named"), [])


class OpenFields(unittest.TestCase):
    def test_which(self):
        text = """pub struct A<'a, T: Fn(u8) -> Map<u8, u8>> where T: Copy {
            /// pub
            #[serde(default, rename = "pub")]
            pub(crate) a: Map<&'a u8, [T; 2]>, b: u8,
            pub c: fn(u8, u8) -> u8, pub(super) d: u8, pub(in crate::x) e: u8, pub(self) f: u8,
        }
        pub(crate) struct B(pub (u8, u8), u8, pub(crate) u8);
        pub struct C;"""
        self.assertEqual(
            said(crate(text, "daemon"), "open-fields"),
            ["some.rs:4 A.a is pub(crate)", "some.rs:5 A.c is pub", "some.rs:7 B.0 is pub", "some.rs:7 B.2 is pub(crate)"],
        )
        self.assertEqual(said(crate(text, "lab"), "open-fields"), [])

    def test_what_crosses_a_boundary(self):
        for path in ("api.rs", "status.rs", "format/mod.rs", "format/redo.rs"):
            self.assertEqual(said({f"crates/engine/src/{path}": "pub struct A { pub a: u8 }"}, "open-fields"), [])
        for path in ("admin/api.rs", "a/b/api.rs", "admin/api/other.rs"):
            self.assertEqual(said({f"crates/daemon/src/{path}": "pub struct A { pub a: u8 }"}, "open-fields"), [])
        for path in ("admin/mod.rs", "admin/apis.rs", "admin/my_api.rs", "admin/my_api/other.rs", "admin/status.rs", "admin/format.rs"):
            self.assertEqual(len(said({f"crates/daemon/src/{path}": "pub struct A { pub a: u8 }"}, "open-fields")), 1, path)
        for name in ("Counters", "VolumeStatus", "AddSpec", "EngineConfig", "LoadOptions", "CheckReport"):
            self.assertEqual(said(crate(f"pub struct {name} {{ pub a: u8 }}", "sim"), "open-fields"), [])
        self.assertEqual(len(said(crate("pub struct StatusLine { pub a: u8 }", "sim"), "open-fields")), 1)


    def test_the_engine_is_open_to_the_parts_of_the_loop(self):
        text = "pub struct {} {{ pub(crate) ground: Ground }}"
        self.assertEqual(said(core({"engine.rs": text.format("Engine")}), "open-fields"), [])
        self.assertEqual(len(said(core({"engine.rs": text.format("Other")}), "open-fields")), 1)
        self.assertEqual(len(said(crate(text.format("Engine"), "sim"), "open-fields")), 1)

    def test_what_is_above_a_room_is_the_crate(self):
        text = "struct A { pub(super) a: u8 }"
        self.assertEqual(said(core({"log.rs": text}), "open-fields"), ["log.rs:1 A.a is pub(crate)"])
        self.assertEqual(said({"crates/engine/src/log/mod.rs": text}, "open-fields"), ["log/mod.rs:1 A.a is pub(crate)"])
        self.assertEqual(said(core({"log/build.rs": text}) | crate(text, "sim"), "open-fields"), [])


class Watermarks(unittest.TestCase):
    def test_one_method_that_one_file_calls(self):
        self.assertEqual(said(core({"log.rs": MOVERS, "front.rs": MOVED}), "watermarks"), [])
        # What it does itself, and what only tests do.
        own = MOVERS + " impl Marks { fn end(&mut self) { self.advance_durable(); } }"
        tests = "mod tests { fn f() { marks.advance_drained(); } }"
        self.assertEqual(said(core({"log.rs": own, "front.rs": MOVED, "drain.rs": tests}), "watermarks"), [])
        self.assertEqual(said(core({"log.rs": MOVERS + MOVED}), "watermarks"), [])

    def test_who_else_moves_one(self):
        other = "fn f() {\n\n marks.advance_drained(); marks.advance_drained(); }"
        self.assertEqual(
            said(core({"log.rs": MOVERS, "drain/a.rs": other, "front.rs": MOVED}), "watermarks"),
            ["front.rs:6 the mark drained is moved in crates/engine/src/drain/a.rs as well"],
        )

    def test_what_nobody_or_another_method_moves(self):
        unmoved = MOVED.replace("marks.advance_sent();", "")
        self.assertEqual(said(core({"log.rs": MOVERS, "front.rs": unmoved}), "watermarks"), ["log.rs:1 nobody moves the mark sent by advance_sent"])
        twice = said(core({"log.rs": MOVERS, "drain.rs": "impl A { fn advance_sent() {} }", "front.rs": MOVED}), "watermarks")
        self.assertEqual(len(twice), 1)
        self.assertIn("one method advance_sent", twice[0])
        missing = said(core({"log.rs": MOVERS.replace("advance_built", "build"), "front.rs": MOVED}), "watermarks")
        self.assertEqual(len(missing), 1)
        self.assertTrue(missing[0].endswith("not: nowhere"), missing)


class Sizes(unittest.TestCase):
    def test_structs(self):
        fields = lambda number: ", ".join(f"f{i}: Map<u8, fn(u8, u8) -> u8>" for i in range(number))
        for head in ("struct A", "pub struct A<T: Into<[u8; 4]>> where T: Copy,", "union A"):
            self.assertEqual(said(crate(f"{head} {{ {fields(20)}, }}"), "struct-size"), [])
            self.assertEqual(said(crate(f"{head} {{ {fields(21)} }}"), "struct-size"), ["some.rs:1 A has 21 fields, and at most 20 are allowed"])
        self.assertEqual(len(said(crate(f"struct A({'u8, ' * 21});"), "struct-size")), 1)
        self.assertEqual(said(crate(f"enum A {{ B {{ {fields(21)} }} }} fn f() {{ let union = 1; }}"), "struct-size"), [])
        # Lists by nature.
        of = lambda path, name: said({f"crates/{path}": f"pub struct {name} {{ {fields(21)} }}"}, "struct-size")
        for path, name in (("engine/src/format/mod.rs", "Item"), ("engine/src/status.rs", "DeviceStatus"), ("lab/src/a.rs", "VolumeCounters")):
            self.assertEqual(of(path, name), [])
        for path, name in (("engine/src/log/format.rs", "Item"), ("lab/src/status.rs", "DeviceStatus"), ("lab/src/a.rs", "CountersOf")):
            self.assertEqual(len(of(path, name)), 1)

    def test_parameters(self):
        said_of = lambda text: said(crate(text), "parameters")
        five = "a: Map<u8, u8>, (b, c): (u8, u8), d: impl Fn(u8, u8) -> u8, e: [u8; 2], #[cfg(x)] f: &'a mut dyn A<B = C>"
        for text in (
            f"fn f({five}) {{}}",
            f"impl A {{ pub(crate) async fn f<F: Fn(u8) -> u8>(&'a mut self, {five},) -> B {{}} }}",
            f"trait T {{ fn f(mut self: Box<Self>, {five}) -> u8; }}",
            f"impl<T> Other<T> for A where T: for<'a> B<'a> {{ fn f({five}, g: u8, h: u8) {{}} }}",
            f'unsafe extern "C" {{ fn f({five}, g: u8); }}',
            f"type F = fn({five}, u8); fn g(f: fn(u8, u8, u8, u8, u8, u8)) {{ h(1, 2, 3, 4, 5, 6); }}",
        ):
            self.assertEqual(said_of(text), [], text)
        for text in (
            f"fn f({five}, g: u8) {{}}",
            f'pub extern "C" fn f({five}, g: u8) {{}}',
            f"impl<T: Fn() -> u8> A<T> {{ fn f(&self, {five}, g: u8) {{}} }}",
            f"impl A where for<'a> B: C<'a> {{ fn f({five}, g: u8) {{}} }}",
            f"trait T {{ fn f({five}, g: u8); }}",
            f"impl Other for A {{ fn a() {{ fn f({five}, g: u8) {{}} }} }}",
        ):
            self.assertEqual(said_of(text), ["some.rs:1 f has 6 parameters, and at most 5 are allowed"], text)

    def test_functions(self):
        said_of = lambda text: said(crate(text), "function-length")
        self.assertEqual(said_of("fn f()\nwhere T: Copy,\n{\n" + lines(70) + "\n// }\n/* \n\n */ }"), [])
        self.assertEqual(said_of("\nfn f() -> [u8; 2] {\n" + lines(71) + "}"), ["some.rs:2 f has 71 lines of code, and at most 70 are allowed"])
        self.assertEqual(said_of('fn f() { "' + "\n{" * 69 + '" }'), [])
        self.assertEqual(len(said_of('fn f() { "' + "\n" * 70 + '" }')), 1)
        self.assertEqual(len(said_of("impl A for B { fn f() {" + lines(71) + "} }")), 1)

    def test_a_flat_match_may_be_long(self):
        arms = "A::B { c, .. } if c > 1 => f(c),\n(1, _) => {\n a();\n b();\n}\n_ => |x| (x, x),\n" * 15
        said_of = lambda text: said(crate(text), "function-length")
        self.assertEqual(said_of("fn f() { match f(a, b) {\n" + arms + "} }"), [])
        for text in (
            "fn f() { match a {\n" + arms + "_ => if b { c } else { d },\n} }",
            "fn f() { match a {\n" + arms + "_ => { match b {} }\n} }",
            "fn f() { let a = 1; match a {\n" + arms + "} }",
            "fn f() { match a {\n" + arms + "}; b }",
        ):
            self.assertEqual(len(said_of(text)), 1, text)

    def test_files(self):
        for path in ("crates/lab/src/a.rs", "crates/lab/src/a/tests.rs", "crates/lab/tests/a.rs", "tests/src/a.rs"):
            self.assertEqual(said({path: "\n" * 700}, "file-length"), [])
            self.assertEqual(len(said({path: "\n" * 701}, "file-length")), 1)


class Exceptions(unittest.TestCase):
    LONG = "pub fn f(a: A, b: B, c: C, d: D, e: E, f: F) {\n" + lines(71) + "}\n"

    def test_an_exception_is_for_one_rule_of_one_item_and_has_a_reason(self):
        rules = ("parameters", "function-length", "exceptions")
        counts = lambda text: [len(said(crate(text + self.LONG), rule)) for rule in rules]
        self.assertEqual(counts(""), [1, 1, 0])
        self.assertEqual(counts('#[expect(clippy::too_many_arguments, reason = "so")]\n#[inline]\n'), [0, 1, 0])
        self.assertEqual(counts('/// A\n#[expect(clippy::too_many_lines, clippy::too_many_arguments, reason = "so")]\n'), [0, 0, 0])
        self.assertEqual(counts("#[expect(clippy::too_many_lines)]\n"), [1, 1, 1])
        self.assertEqual(counts('#[allow(clippy::too_many_lines, reason = "so")]\n'), [1, 1, 0])
        self.assertEqual(counts('#![expect(clippy::too_many_lines, reason = "so")]\n'), [1, 1, 0])
        self.assertEqual(counts('#[expect(clippy::too_many_lines, reason = "so")]\nfn other() {}\n'), [1, 1, 0])
        struct = "struct A(" + "u8, " * 21 + ");"
        self.assertEqual(said(crate('#[expect(clippy::struct_excessive_bools, reason = "so")]\n' + struct), "struct-size"), [])

    def test_there_are_few(self):
        one = '#[expect(clippy::too_many_lines, reason = "so")]\nfn f() {}\n'
        self.assertEqual(said(crate(one * 5), "exceptions"), [])
        self.assertEqual(len(said(crate(one * 3) | crate(one * 3, "sim"), "exceptions")), 6)
        self.assertEqual(said(crate('#[expect(clippy::unwrap_used, reason = "so")]\nfn f() {}\n' * 6), "exceptions"), [])


if __name__ == "__main__":
    unittest.main()
