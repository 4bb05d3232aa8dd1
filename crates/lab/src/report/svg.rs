//! Parts of charts: scales, axes, markers.

use maud::{Markup, html};

use crate::results::Durability;
use crate::stats::Bound;

/// Approximate width of a character of a chart's text, in units of the drawing.
const CHARACTER: f64 = 6.2;
/// Least distance between two ticks side by side.
const TICK_WIDTH: f64 = 38.0;
/// Least distance between two ticks one above the other.
const TICK_HEIGHT: f64 = 17.0;
/// Number of colours of placements and series.
const COLOURS: usize = 7;
/// Number of shapes of markers. It has no factor in common with the number of colours, so a colour
/// and a shape come together again only after 35 placements.
const SHAPES: usize = 5;

/// A coordinate as text.
pub(super) fn px(value: f64) -> String {
    format!("{value:.1}")
}

/// Shortens a text to a width.
pub(super) fn fit(text: &str, width: f64) -> String {
    let most = (width / CHARACTER).max(1.0) as usize;
    if text.chars().count() <= most {
        return text.into();
    }
    let kept: String = text.chars().take(most - 1).collect();
    format!("{kept}…")
}

/// Approximate width of a text.
pub(super) fn width(text: &str) -> f64 {
    text.chars().count() as f64 * CHARACTER
}

/// The positions of values on an axis.
pub(super) struct Scale {
    low: f64,
    high: f64,
    logarithmic: bool,
    from: f64,
    to: f64,
}

impl Scale {
    /// A linear scale from 0 to `most`, or to 1 if `most` is not a finite number above 0.
    pub fn linear(most: f64, from: f64, to: f64) -> Scale {
        let high = if most.is_finite() && most > 0.0 { most } else { 1.0 };
        Scale { low: 0.0, high, logarithmic: false, from, to }
    }

    /// A logarithmic scale that covers all finite values above 0.
    pub fn logarithmic(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Scale {
        let good = values.filter(|value| value.is_finite() && *value > 0.0);
        let (low, high) = good.fold((f64::MAX, 0.0f64), |(low, high), v| (low.min(v), high.max(v)));
        let (low, high) =
            if high > 0.0 { (low / 1.2, (high * 1.2).min(f64::MAX)) } else { (0.5, 2.0) };
        Scale { low, high, logarithmic: true, from, to }
    }

    /// Position of a value. None for a value that is not finite, and on a logarithmic scale for a
    /// value that is not above 0.
    pub fn at(&self, value: f64) -> Option<f64> {
        if !value.is_finite() || (self.logarithmic && value <= 0.0) {
            return None;
        }
        let part = if self.logarithmic {
            (value.ln() - self.low.ln()) / (self.high.ln() - self.low.ln())
        } else {
            (value - self.low) / (self.high - self.low)
        };
        Some(self.from + part.clamp(0.0, 1.0) * (self.to - self.from))
    }

    /// Round values for the ticks of the scale.
    pub fn ticks(&self) -> Vec<f64> {
        if !self.logarithmic {
            let step = round_step(self.high / 4.0);
            return (0..=5)
                .map(|n| f64::from(n) * step)
                .filter(|v| *v <= self.high * 1.001)
                .collect();
        }
        let decades = (self.low.log10().floor() as i32)..=(self.high.log10().ceil() as i32);
        let of = |steps: &[f64]| -> Vec<f64> {
            let all = decades
                .clone()
                .flat_map(|decade| steps.iter().map(move |s| s * 10f64.powi(decade)));
            all.filter(|value| (self.low..=self.high).contains(value)).collect()
        };
        let choices = [
            &[1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0][..],
            &[1.0, 2.0, 3.0, 5.0],
            &[1.0, 2.0, 5.0],
        ];
        let gap = if self.to > self.from { TICK_WIDTH } else { TICK_HEIGHT };
        let place = |value: &f64| self.at(*value).unwrap_or(self.from);
        let fits = |ticks: &Vec<f64>| {
            ticks.windows(2).all(|two| (place(&two[1]) - place(&two[0])).abs() >= gap)
        };
        choices.iter().map(|steps| of(steps)).find(fits).unwrap_or_else(|| of(&[1.0]))
    }
}

/// The least of 1, 2, 5, 10, 20… (and of 0.5, 0.2, 0.1…) that is not below `least`.
fn round_step(least: f64) -> f64 {
    let decade = 10f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .map(|step| step * decade)
        .into_iter()
        .find(|s| *s >= least * 0.999)
        .unwrap_or(least)
}

/// The value of a tick as text.
pub(super) fn tick(value: f64) -> String {
    if value >= 1_000.0 {
        return crate::words::number(value);
    }
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

/// The x axis: ticks below a plot with their lines, and the title of the axis. The plot goes from
/// `top` to `bottom`.
pub(super) fn x_axis(scale: &Scale, top: f64, bottom: f64, title: &str) -> Markup {
    html! {
        @for value in scale.ticks() {
            @if let Some(x) = scale.at(value) {
                line.axis x1=(px(x)) x2=(px(x)) y1=(px(top)) y2=(px(bottom)) {}
                text.t x=(px(x)) y=(px(bottom + 13.0)) text-anchor="middle" { (tick(value)) }
            }
        }
        text.t x=(px((scale.from + scale.to) / 2.0)) y=(px(bottom + 29.0)) text-anchor="middle" { (title) }
    }
}

/// The y axis: ticks left of a plot with their lines, and the title of the axis above the plot. The
/// plot goes from `left` to `right`.
pub(super) fn y_axis(scale: &Scale, left: f64, right: f64, title: &str) -> Markup {
    let top = scale.from.min(scale.to);
    html! {
        @for value in scale.ticks() {
            @if let Some(y) = scale.at(value) {
                line.axis x1=(px(left)) x2=(px(right)) y1=(px(y)) y2=(px(y)) {}
                text.t x=(px(left - 5.0)) y=(px(y + 4.0)) text-anchor="end" { (tick(value)) }
            }
        }
        text.t x="4" y=(px(top - 8.0)) { (title) }
    }
}

/// How a placement is drawn: everywhere in one colour and shape. The marker is hollow with one
/// copy, full with more copies, and a cross when writes are in memory only.
#[derive(Debug, Clone, Copy)]
pub(super) struct Look {
    index: usize,
    durability: Option<Durability>,
}

impl Look {
    /// The look of the placement at `index`.
    pub fn new(index: usize, durability: Option<Durability>) -> Look {
        Look { index, durability }
    }

    fn is_volatile(self) -> bool {
        self.durability == Some(Durability::Volatile)
    }

    /// The CSS class of the colour.
    pub fn colour(self) -> String {
        if self.is_volatile() { "cv".into() } else { format!("c{}", self.index % COLOURS) }
    }

    /// The CSS classes of the line.
    pub fn line(self) -> String {
        format!("line {}{}", self.colour(), if self.is_volatile() { " dash" } else { "" })
    }

    /// The marker at a position, with a radius.
    pub fn marker(self, x: f64, y: f64, r: f64) -> Markup {
        let full = if self.durability > Some(Durability::OneCopy) { " full" } else { "" };
        let class = format!("mark {}{full}", self.colour());
        if self.is_volatile() {
            let cross = [(-r, -r), (r, r), (-r, r), (r, -r)]
                .map(|(dx, dy)| format!("{},{}", px(x + dx), px(y + dy)));
            let [a, b, c, d] = cross;
            return html! { path class=(class) d={ "M" (a) "L" (b) "M" (c) "L" (d) } {} };
        }
        let corners: &[(f64, f64)] = match self.index % SHAPES {
            0 => return html! { circle class=(class) cx=(px(x)) cy=(px(y)) r=(px(r)) {} },
            1 => &[(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
            2 => &[(0.0, -1.2), (1.1, 0.9), (-1.1, 0.9)],
            3 => &[(0.0, -1.3), (1.3, 0.0), (0.0, 1.3), (-1.3, 0.0)],
            _ => &[(0.0, 1.2), (1.1, -0.9), (-1.1, -0.9)],
        };
        let points: Vec<String> = corners
            .iter()
            .map(|(dx, dy)| format!("{},{}", px(x + dx * r), px(y + dy * r)))
            .collect();
        html! { polygon class=(class) points=(points.join(" ")) {} }
    }

    /// An arrow that shows on which side of a marker the true value may lie.
    pub fn arrow(self, bound: Bound, x: f64, y: f64) -> Markup {
        let to = match bound {
            Bound::AtLeast => 1.0,
            Bound::AtMost => -1.0,
            Bound::Exact | Bound::Unknown => return html! {},
        };
        let (begin, tip) = (x + 6.0 * to, x + 17.0 * to);
        let back = tip - 4.0 * to;
        html! {
            path class={ "span " (self.colour()) }
                d={ "M" (px(begin)) "," (px(y)) "H" (px(tip)) "M" (px(back)) "," (px(y - 4.0)) "L" (px(tip)) "," (px(y)) "L" (px(back)) "," (px(y + 4.0)) } {}
        }
    }
}

/// The CSS classes of the line of a series that is no placement.
pub(super) fn series(index: usize) -> String {
    format!("line c{}{}", index % COLOURS, if index >= COLOURS { " dash" } else { "" })
}

/// A placement in a chart with one row for each placement.
pub(super) struct Row {
    /// Name of the placement.
    pub label: String,
    /// Figure of the placement, in words.
    pub value: String,
    /// How the placement is drawn.
    pub look: Look,
    /// Value of every repeat.
    pub dots: Vec<f64>,
    /// Value at the marker, such as the mean of the repeats.
    pub center: Option<f64>,
    /// Ends of the line through the marker, such as an interval.
    pub interval: Option<(f64, f64)>,
    /// One more value, drawn as a stroke.
    pub stroke: Option<f64>,
    /// Where the true value may lie.
    pub bound: Bound,
}

/// A chart with a row for each placement: dots of all repeats, their mean and its interval over a
/// logarithmic axis. `band` is the range around 1 in which ratios make no difference.
pub(super) fn rows(
    width: f64,
    about: &str,
    axis: &str,
    rows: &[Row],
    band: Option<(f64, f64)>,
) -> Markup {
    const HEIGHT: f64 = 36.0;
    let bottom = rows.len() as f64 * HEIGHT + 4.0;
    let values = rows.iter().flat_map(|row| {
        let ends = row.interval.into_iter().flat_map(|(low, high)| [low, high]);
        row.dots.iter().copied().chain(row.center).chain(row.stroke).chain(ends)
    });
    // An interval of two repeats may span many decades. It is cut off two decades beyond the
    // centres.
    let centers: Vec<f64> =
        rows.iter().flat_map(|row| row.dots.iter().copied().chain(row.center)).collect();
    let least = centers.iter().copied().filter(|v| *v > 0.0).fold(f64::MAX, f64::min) / 100.0;
    let most = centers.iter().copied().filter(|v| v.is_finite()).fold(0.0, f64::max) * 100.0;
    let values = values.filter(|v| (least..=most).contains(v)).chain(band.map(|_| 1.0));
    let scale = Scale::logarithmic(values, 12.0, width - 22.0);
    html! {
        svg viewBox={ "0 0 " (px(width)) " " (px(bottom + 36.0)) } role="img" aria-label=(about) {
            @if let Some((low, high)) = band.and_then(|(low, high)| scale.at(low).zip(scale.at(high))) {
                rect.band x=(px(low)) width=(px(high - low)) y="0" height=(px(bottom)) {}
            }
            (x_axis(&scale, 0.0, bottom, axis))
            @if let Some(one) = scale.at(1.0).filter(|_| band.is_some()) {
                line.one x1=(px(one)) x2=(px(one)) y1="0" y2=(px(bottom)) {}
            }
            @for (index, row) in rows.iter().enumerate() {
                (self::row(row, &scale, width, index as f64 * HEIGHT))
            }
        }
    }
}

fn row(row: &Row, scale: &Scale, full: f64, top: f64) -> Markup {
    let y = top + 25.0;
    let colour = row.look.colour();
    html! {
        g {
            title { (row.label) ": " (row.value) }
            text x="4" y=(px(top + 13.0)) { (fit(&row.label, full - width(&row.value) - 16.0)) }
            text x=(px(full - 4.0)) y=(px(top + 13.0)) text-anchor="end" { (row.value) }
            @if let Some((low, high)) = row.interval.and_then(|(low, high)| scale.at(low).zip(scale.at(high))) {
                line class={ "span " (colour) } x1=(px(low)) x2=(px(high)) y1=(px(y)) y2=(px(y)) {}
            }
            @for x in row.dots.iter().filter_map(|value| scale.at(*value)) {
                circle class={ "dot " (colour) } cx=(px(x)) cy=(px(y)) r="2.6" {}
            }
            @if let Some(x) = row.stroke.and_then(|value| scale.at(value)) {
                line class={ "tail " (colour) } x1=(px(x)) x2=(px(x)) y1=(px(y - 6.0)) y2=(px(y + 6.0)) {}
            }
            @if let Some(x) = row.center.and_then(|value| scale.at(value)) {
                (row.look.marker(x, y, 4.5))
                (row.look.arrow(row.bound, x, y))
            }
        }
    }
}

/// One chart for wide and one for narrow windows, of which the page shows one.
pub(super) fn both(wide: f64, draw: impl Fn(f64) -> Markup) -> Markup {
    html! {
        div.at-wide { (draw(wide)) }
        div.at-narrow { (draw(360.0)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_place_what_can_be_placed() {
        let scale = Scale::logarithmic([10.0, f64::NAN, 0.0, 1_000.0].into_iter(), 0.0, 300.0);
        assert_eq!((scale.at(0.0), scale.at(f64::NAN)), (None, None));
        assert!((scale.at(100.0).expect("inside") - 150.0).abs() < 1e-6);
        assert_eq!(scale.ticks(), [10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0]);
        let nothing = Scale::logarithmic(std::iter::empty(), 0.0, 100.0);
        assert!(nothing.at(1.0).is_some() && !nothing.ticks().is_empty());
        assert_eq!(Scale::linear(93.0, 0.0, 1.0).ticks(), [0.0, 50.0]);
        assert_eq!(Scale::linear(f64::NAN, 0.0, 1.0).ticks().first(), Some(&0.0));
        assert_eq!(
            (tick(0.05), tick(20.0), tick(2_000.0)),
            ("0.05".into(), "20".into(), "2,000".into())
        );
    }

    #[test]
    fn texts_are_cut_to_their_place() {
        assert_eq!((fit("äöü", 100.0), fit("placement", 31.0)), ("äöü".into(), "plac…".into()));
    }
}
