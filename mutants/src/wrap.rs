//! Finds what is mutated in a source, and says how it is written so that all its mutants are in it.

use crate::list::{Genre, Mutant, Place};
use proc_macro2::Span;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{BinOp, Expr, Pat, ReturnType, Type, UnOp};

/// A piece of what is written instead of a stretch of the source.
pub enum Part {
    /// Text of our own.
    Text(String),
    /// A stretch of the source, with the mutants in it.
    Source(Range<usize>),
    /// What is there for one mutant only, and goes with it.
    Only(usize, String),
    /// Notes whether a mutant would change a result; goes if that cannot be compared.
    Compare(usize, String),
}

/// A stretch of the source with mutants of its own.
pub struct Wrap {
    /// The stretch, in bytes of the source.
    pub range: Range<usize>,
    /// What is written instead; the source alone if no mutant is left.
    pub parts: Vec<Part>,
    /// Its mutants.
    pub mutants: Vec<usize>,
}

/// A source with mutants.
pub struct Source {
    /// As it was.
    pub text: String,
    /// Stretches with mutants, outer ones first.
    pub wraps: Vec<Wrap>,
    /// Mutants that have a place in `wraps`.
    pub found: BTreeSet<usize>,
    /// Mutants in what the compiler evaluates, which nothing can switch at run time.
    pub constant: BTreeSet<usize>,
    /// Arms without which a match would not be complete.
    pub unviable: BTreeSet<usize>,
}

impl Source {
    /// The source `text` of `file` with those of `mutants` that are in it.
    pub fn new(file: &str, text: String, mutants: &[Mutant]) -> Result<Source, String> {
        let syntax = syn::parse_file(&text).map_err(|error| format!("{file}: {error}"))?;
        let mut at: HashMap<(Genre, Place), Vec<usize>> = HashMap::new();
        for (index, mutant) in mutants.iter().enumerate().filter(|(_, mutant)| mutant.file == file)
        {
            at.entry((mutant.genre, mutant.start)).or_default().push(index + 1);
        }
        let (constant, unviable) = Default::default();
        let mut finder =
            Finder { mutants, at, wraps: Vec::new(), constants: 0, constant, unviable };
        finder.visit_file(&syntax);
        let Finder { mut wraps, constant, unviable, .. } = finder;
        // A stable sort: what is around something of the same extent was found first.
        wraps.sort_by_key(|wrap| (wrap.range.start, std::cmp::Reverse(wrap.range.end)));
        let found = wraps.iter().flat_map(|wrap| wrap.mutants.iter().copied()).collect();
        Ok(Source { text, wraps, found, constant, unviable })
    }
}

struct Finder<'a> {
    mutants: &'a [Mutant],
    at: HashMap<(Genre, Place), Vec<usize>>,
    wraps: Vec<Wrap>,
    /// How many things that the compiler evaluates are around.
    constants: usize,
    constant: BTreeSet<usize>,
    unviable: BTreeSet<usize>,
}

/// The first and the last of a wrap's mutants, as arguments.
fn bounds(mutants: &[usize]) -> String {
    format!("{}, {}", mutants[0], mutants[mutants.len() - 1])
}

fn text(text: impl Into<String>) -> Part {
    Part::Text(text.into())
}

fn source(node: &impl Spanned) -> Part {
    Part::Source(node.span().byte_range())
}

impl Finder<'_> {
    fn take(&mut self, genre: Genre, span: Span) -> Vec<usize> {
        let start = span.start();
        let found = self.at.remove(&(genre, (start.line, start.column + 1))).unwrap_or_default();
        if self.constants > 0 {
            self.constant.extend(&found);
            return Vec::new();
        }
        found
    }

    fn replacement(&self, number: usize) -> &str {
        &self.mutants[number - 1].replacement
    }

    fn wrap(&mut self, range: Range<usize>, mutants: Vec<usize>, parts: Vec<Part>) {
        self.wraps.push(Wrap { range, parts, mutants });
    }

    fn evaluated(&mut self, visit: impl FnOnce(&mut Self)) {
        self.constants += 1;
        visit(self);
        self.constants -= 1;
    }

    fn function(&mut self, output: &ReturnType, block: &syn::Block) {
        let (Some(first), Some(last)) = (block.stmts.first(), block.stmts.last()) else { return };
        let mutants = self.take(Genre::FnValue, first.span());
        if mutants.is_empty() {
            return;
        }
        let range = first.span().byte_range().start..last.span().byte_range().end;
        let opaque =
            matches!(output, ReturnType::Type(_, of) if matches!(**of, Type::ImplTrait(_)));
        let mut parts = vec![text(format!("if !crate::mutant::off({}) {{", bounds(&mutants)))];
        for &number in &mutants {
            let value = self.replacement(number);
            parts.push(Part::Only(
                number,
                match opaque {
                    true => {
                        format!(
                            "if crate::mutant::on({number}) {{ return crate::mutant::Either::Mutant(Box::new({value})); }}"
                        )
                    }
                    false => format!("if crate::mutant::on({number}) {{ return {value}; }}"),
                },
            ));
            parts.push(Part::Compare(number, format!("crate::mutant::note({number}, true);")));
        }
        parts.push(text("}"));
        parts.push(text(if opaque { "crate::mutant::Either::Original({" } else { "" }));
        parts.push(Part::Source(range.clone()));
        parts.push(text(if opaque { "})" } else { "" }));
        self.wrap(range, mutants, parts);
    }

    fn binary(&mut self, node: &syn::ExprBinary) {
        let mutants = self.take(Genre::BinaryOperator, node.op.span());
        if mutants.is_empty() {
            return;
        }
        let range = node.span().byte_range();
        let mut parts = Vec::new();
        match node.op {
            BinOp::And(_) | BinOp::Or(_) => {
                let [number] = mutants[..] else { return };
                if has_let(&node.left) || has_let(&node.right) {
                    return;
                }
                parts.extend([text("({ let x = "), source(&node.left), text("; if x")]);
                parts.push(Part::Only(number, format!(" ^ crate::mutant::reached({number})")));
                match node.op {
                    BinOp::And(_) => {
                        parts.extend([text(" { "), source(&node.right), text(" } else { x } })")])
                    }
                    _ => parts.extend([text(" { x } else { "), source(&node.right), text(" } })")]),
                }
            }
            op if assigns(&op) => {
                let operator = self.mutants_operator(&op);
                parts.extend([
                    text("(match ("),
                    source(&node.right),
                    text(") { y => { let x = &mut "),
                    source(&node.left),
                ]);
                parts.push(text(format!(
                    "; if crate::mutant::off({}) {{ *x {operator} y }}",
                    bounds(&mutants)
                )));
                for &number in &mutants {
                    let other = self.replacement(number);
                    parts.push(Part::Only(
                        number,
                        format!(" else if crate::mutant::reached({number}) {{ *x {other} y }}"),
                    ));
                }
                parts.push(text(format!(" else {{ *x {operator} y }} }} }})")));
            }
            op => {
                let operator = self.mutants_operator(&op);
                let (open, between, close, x, y) = match compares(&op) {
                    true => ("(match (&(", "), &(", ")) { (x, y) => ", "*x", "*y"),
                    false => ("(match (", ", ", ") { (x, y) => ", "x", "y"),
                };
                parts.extend([
                    text(open),
                    source(&node.left),
                    text(between),
                    source(&node.right),
                    text(close),
                ]);
                parts.push(text(format!(
                    "if crate::mutant::off({}) {{ {x} {operator} {y} }}",
                    bounds(&mutants)
                )));
                for &number in &mutants {
                    let other = self.replacement(number);
                    parts.push(Part::Only(
                        number,
                        format!(" else if crate::mutant::on({number}) {{ {x} {other} {y} }}"),
                    ));
                }
                parts.push(text(format!(" else {{ let r = {x} {operator} {y}; ")));
                for &number in &mutants {
                    let other = self.replacement(number);
                    parts.push(match other {
                        "/" | "%" => Part::Compare(number, format!("crate::mutant::note({number}, true); ")),
                        _ => Part::Compare(
                            number,
                            format!("if crate::mutant::recording() {{ crate::mutant::note({number}, r != ({x} {other} {y})) }} "),
                        ),
                    });
                }
                parts.push(text("r } })"));
            }
        }
        self.wrap(range, mutants, parts);
    }

    fn mutants_operator(&self, op: &BinOp) -> &'static str {
        match op {
            BinOp::Add(_) => "+",
            BinOp::Sub(_) => "-",
            BinOp::Mul(_) => "*",
            BinOp::Div(_) => "/",
            BinOp::Rem(_) => "%",
            BinOp::And(_) => "&&",
            BinOp::Or(_) => "||",
            BinOp::BitXor(_) => "^",
            BinOp::BitAnd(_) => "&",
            BinOp::BitOr(_) => "|",
            BinOp::Shl(_) => "<<",
            BinOp::Shr(_) => ">>",
            BinOp::Eq(_) => "==",
            BinOp::Lt(_) => "<",
            BinOp::Le(_) => "<=",
            BinOp::Ne(_) => "!=",
            BinOp::Ge(_) => ">=",
            BinOp::Gt(_) => ">",
            BinOp::AddAssign(_) => "+=",
            BinOp::SubAssign(_) => "-=",
            BinOp::MulAssign(_) => "*=",
            BinOp::DivAssign(_) => "/=",
            BinOp::RemAssign(_) => "%=",
            BinOp::BitXorAssign(_) => "^=",
            BinOp::BitAndAssign(_) => "&=",
            BinOp::BitOrAssign(_) => "|=",
            BinOp::ShlAssign(_) => "<<=",
            BinOp::ShrAssign(_) => ">>=",
            _ => unreachable!("an operator that Rust does not have"),
        }
    }

    fn unary(&mut self, node: &syn::ExprUnary) {
        let mutants = self.take(Genre::UnaryOperator, node.op.span());
        let [number] = mutants[..] else { return };
        let operator = match node.op {
            UnOp::Not(_) => "!",
            UnOp::Neg(_) => "-",
            _ => return,
        };
        let parts = vec![
            text("({ let x = "),
            source(&node.expr),
            text("; "),
            Part::Only(number, format!("if crate::mutant::reached({number}) {{ x }} else ")),
            text(format!("{{ {operator}x }} }})")),
        ];
        self.wrap(node.span().byte_range(), mutants, parts);
    }

    fn arm(&mut self, node: &syn::Arm) {
        let deleted = self.take(Genre::MatchArm, node.span());
        let guards = match &node.guard {
            Some((_, guard)) => self.take(Genre::MatchArmGuard, guard.span()),
            None => Vec::new(),
        };
        if deleted.is_empty() && guards.is_empty() {
            return;
        }
        let without = |number| Part::Only(number, format!("!crate::mutant::reached({number}) && "));
        match &node.guard {
            Some((_, guard)) => {
                let mut parts: Vec<Part> = deleted.iter().map(|&number| without(number)).collect();
                parts.push(text("("));
                for &number in guards.iter().filter(|&&number| self.replacement(number) == "true") {
                    parts.push(Part::Only(number, format!("crate::mutant::on({number}) || ")));
                }
                for &number in guards.iter().filter(|&&number| self.replacement(number) == "false")
                {
                    parts.push(Part::Only(number, format!("!crate::mutant::on({number}) && ")));
                }
                parts.extend([text("{ let r = "), source(guard), text("; ")]);
                for &number in &guards {
                    let value = self.replacement(number) == "true";
                    parts.push(Part::Compare(
                        number,
                        format!("crate::mutant::note({number}, r != {value}); "),
                    ));
                }
                parts.push(text("r })"));
                let all = deleted.into_iter().chain(guards).collect();
                self.wrap(guard.span().byte_range(), all, parts);
            }
            None => {
                let parts =
                    vec![source(&node.pat), text(" if "), without(deleted[0]), text("true ")];
                self.wrap(node.pat.span().byte_range(), deleted, parts);
            }
        }
    }

    fn structure(&mut self, node: &syn::ExprStruct) {
        let Some(rest) = &node.rest else { return };
        let path = matches!(**rest, Expr::Path(_));
        let base =
            if path { rest.span().source_text().unwrap_or_default() } else { "rest_of_it".into() };
        let first = self.wraps.len();
        for field in &node.fields {
            let mutants = self.take(Genre::StructField, field.span());
            let [number] = mutants[..] else { continue };
            let member = match &field.member {
                syn::Member::Named(name) => name.to_string(),
                syn::Member::Unnamed(index) => index.index.to_string(),
            };
            let taken = format!("if crate::mutant::reached({number}) {{ {base}.{member} }} else ");
            let value = [text(" { "), source(&field.expr), text(" }")];
            let mut parts = vec![text(format!("{member}: ")), Part::Only(number, taken)];
            parts.extend(value);
            self.wrap(field.span().byte_range(), mutants, parts);
        }
        let mutants: Vec<usize> =
            self.wraps[first..].iter().flat_map(|wrap| wrap.mutants.clone()).collect();
        if !path && !mutants.is_empty() {
            let (all, rest) = (node.span().byte_range(), rest.span().byte_range());
            let parts = vec![
                text(format!("({{ let {base} = ")),
                Part::Source(rest.clone()),
                text("; "),
                Part::Source(all.start..rest.start),
                text(format!("{base} }} }})")),
            ];
            self.wrap(all, mutants, parts);
        }
    }
}

fn has_let(expression: &Expr) -> bool {
    match expression {
        Expr::Let(_) => true,
        Expr::Binary(node) => has_let(&node.left) || has_let(&node.right),
        _ => false,
    }
}

fn assigns(op: &BinOp) -> bool {
    matches!(
        op,
        BinOp::AddAssign(_)
            | BinOp::SubAssign(_)
            | BinOp::MulAssign(_)
            | BinOp::DivAssign(_)
            | BinOp::RemAssign(_)
            | BinOp::BitXorAssign(_)
            | BinOp::BitAndAssign(_)
            | BinOp::BitOrAssign(_)
            | BinOp::ShlAssign(_)
            | BinOp::ShrAssign(_)
    )
}

fn compares(op: &BinOp) -> bool {
    matches!(
        op,
        BinOp::Eq(_) | BinOp::Lt(_) | BinOp::Le(_) | BinOp::Ne(_) | BinOp::Ge(_) | BinOp::Gt(_)
    )
}

impl<'ast> Visit<'ast> for Finder<'_> {
    fn visit_item_fn(&mut self, node: &'ast syn::ItemFn) {
        self.function(&node.sig.output, &node.block);
        visit::visit_item_fn(self, node);
    }

    fn visit_impl_item_fn(&mut self, node: &'ast syn::ImplItemFn) {
        self.function(&node.sig.output, &node.block);
        visit::visit_impl_item_fn(self, node);
    }

    fn visit_trait_item_fn(&mut self, node: &'ast syn::TraitItemFn) {
        if let Some(block) = &node.default {
            self.function(&node.sig.output, block);
        }
        visit::visit_trait_item_fn(self, node);
    }

    fn visit_expr_binary(&mut self, node: &'ast syn::ExprBinary) {
        self.binary(node);
        visit::visit_expr_binary(self, node);
    }

    fn visit_expr_unary(&mut self, node: &'ast syn::ExprUnary) {
        self.unary(node);
        visit::visit_expr_unary(self, node);
    }

    fn visit_expr_match(&mut self, node: &'ast syn::ExprMatch) {
        let catches_all =
            |arm: &syn::Arm| arm.guard.is_none() && matches!(arm.pat, Pat::Wild(_) | Pat::Ident(_));
        if !node.arms.iter().any(catches_all) {
            for arm in &node.arms {
                let mutants = self.take(Genre::MatchArm, arm.span());
                self.unviable.extend(mutants);
            }
        }
        visit::visit_expr_match(self, node);
    }

    fn visit_arm(&mut self, node: &'ast syn::Arm) {
        self.arm(node);
        visit::visit_arm(self, node);
    }

    fn visit_expr_struct(&mut self, node: &'ast syn::ExprStruct) {
        self.structure(node);
        visit::visit_expr_struct(self, node);
    }

    fn visit_item_const(&mut self, node: &'ast syn::ItemConst) {
        self.evaluated(|finder| visit::visit_item_const(finder, node));
    }

    fn visit_item_static(&mut self, node: &'ast syn::ItemStatic) {
        self.evaluated(|finder| visit::visit_item_static(finder, node));
    }

    fn visit_impl_item_const(&mut self, node: &'ast syn::ImplItemConst) {
        self.evaluated(|finder| visit::visit_impl_item_const(finder, node));
    }

    fn visit_expr_const(&mut self, node: &'ast syn::ExprConst) {
        self.evaluated(|finder| visit::visit_expr_const(finder, node));
    }

    fn visit_type(&mut self, node: &'ast Type) {
        self.evaluated(|finder| visit::visit_type(finder, node));
    }

    fn visit_expr_repeat(&mut self, node: &'ast syn::ExprRepeat) {
        self.visit_expr(&node.expr);
        self.evaluated(|finder| finder.visit_expr(&node.len));
    }
}
