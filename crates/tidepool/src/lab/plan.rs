//! `tidepool lab plan`.

use crate::cli::lab::PlanArgs;
use crate::output;
use std::path::{Path, PathBuf};
use tidepool_cluster::device::real;
use tidepool_daemon::config;
use tidepool_daemon::failure::Failure;
use tidepool_lab::plan::{
    Advice, Bill, Effect, Evidence, HostPlan, Inventory, Kind, Measured, Placed, Placement, Plan,
    Role, Verdict, binary, decimal, lasting, plan,
};

/// Runs the command.
pub fn run(args: &PlanArgs) -> Result<(), Failure> {
    let inventory = match &args.inventory {
        Some(path) => read(path)?,
        None => Inventory::of_machine(&real::all().map_err(Failure::failed)?),
    };
    let cited = |path: &PathBuf| -> Result<Evidence, Failure> {
        Ok(Evidence { file: path.display().to_string(), results: super::results(path)? })
    };
    let evidence: Vec<Evidence> = args.results.iter().map(cited).collect::<Result<_, Failure>>()?;
    output::print(args.output.format, &plan(&inventory, &evidence), text)
}

fn read(path: &Path) -> Result<Inventory, Failure> {
    let shown = path.display();
    let text = config::read_text(path)
        .map_err(|why| Failure::usage(format!("cannot read the inventory {shown}: {why}")))?;
    Inventory::parse(&text).map_err(|error| {
        let place = error.at.map(|at| config::position(&text, at));
        let place = place
            .map(|(line, column)| format!("line {line}, column {column}: "))
            .unwrap_or_default();
        let why = config::explain(&error.why);
        Failure::usage(format!("cannot use the inventory {shown}: {place}{why}"))
    })
}

fn text(plan: &Plan) -> String {
    let mut text = format!("{}\nFor {}, and for nothing else. [key]\n\n", plan.answer, key(plan));
    text.push_str(&verdicts(plan));
    if !plan.bills.is_empty() {
        let one = plan.bills.len() == 1;
        text.push_str(if one { "\nSSDs\n" } else { "\nSSDs, on one side or on the other\n" });
        text.push_str(&bills(plan));
    }
    let hosts = plan.hosts.iter().filter(|host| !host.placed.is_empty() || !host.advice.is_empty());
    text.extend(hosts.map(host));
    section(
        &mut text,
        "Not used",
        plan.refused.iter().map(|refused| {
            let owner = refused.host.as_deref().unwrap_or("offer");
            format!("{owner}, {}: {}", refused.drive, cited(&refused.why))
        }),
    );
    let unmatched = plan
        .unmatched
        .iter()
        .map(|file| format!("{file}: nothing in it was measured under these conditions"));
    section(&mut text, "Not cited", unmatched);
    section(&mut text, "Not told", plan.missing.iter().cloned());
    section(
        &mut text,
        "Rules",
        plan.rules.iter().map(|rule| format!("[{}] {} ({})", rule.id, rule.statement, rule.source)),
    );
    text
}

/// A heading and its lines, if there are any.
fn section(text: &mut String, heading: &str, lines: impl Iterator<Item = String>) {
    for (index, line) in lines.enumerate() {
        if index == 0 {
            text.push_str(&format!("\n{heading}\n"));
        }
        text.push_str(&format!("  {line}\n"));
    }
}

fn cited(advice: &Advice) -> String {
    format!("{} [{}]", advice.text, advice.rules.join(", "))
}

fn key(plan: &Plan) -> String {
    let key = &plan.key;
    let block = key.block_bytes.map_or("requests of unknown size".into(), |bytes| {
        format!("requests of {}", binary(bytes))
    });
    let reads = key.read_percent.map_or("unknown mix".into(), |reads| format!("{reads} % reads"));
    let depth = key
        .queue_depth
        .map_or("unknown queue depth".into(), |depth| format!("queue depth {depth}"));
    let media: Vec<&str> = key.media.iter().map(|&kind| kind.name()).collect();
    let media = if media.is_empty() { "unknown drives".into() } else { media.join(" and ") };
    format!("{block}, {reads}, {depth}, OSDs on {media}")
}

fn place(placement: Placement) -> &'static str {
    match placement {
        Placement::Host => "hypervisor: Tidepool",
        Placement::DbWal => "OSDs: database and log",
        Placement::Journal => "OSDs: journal",
        Placement::OsdCache => "OSDs: cache under them",
    }
}

fn effect(effect: Effect) -> &'static str {
    match effect {
        Effect::Helps => "helps",
        Effect::ReadsOnly => "reads only",
        Effect::WritesOnly => "writes only",
        Effect::Little => "little",
        Effect::No => "no",
        Effect::NotKnown => "not known",
    }
}

fn verdicts(plan: &Plan) -> String {
    let mut table = output::table(&["PLACE", "OSDS ON", "AN SSD THERE", ""], &[]);
    for verdict in &plan.verdicts {
        let first = plan.first == Some(verdict.placement)
            && (verdict.media.is_none() || verdict.media == plan.key.media.first().copied());
        table.add_row([
            place(verdict.placement),
            verdict.media.map_or("-", Kind::name),
            effect(verdict.effect),
            if first { "first" } else { "" },
        ]);
    }
    let mut text = output::render(&table);
    for verdict in &plan.verdicts {
        text.push_str(&why(verdict));
    }
    text
}

fn why(verdict: &Verdict) -> String {
    let media = verdict.media.map(|media| format!(" ({})", media.name())).unwrap_or_default();
    let mut text = format!("\n{}{media}\n", place(verdict.placement));
    for advice in &verdict.advice {
        text.push_str(&format!("  {}\n", cited(advice)));
    }
    text.extend(verdict.measured.iter().map(measured));
    text
}

/// A measurement with all that it holds for.
fn measured(found: &Measured) -> String {
    let Measured { file, placement, against, iops, conditions } = found;
    let why = iops.why.as_ref().map(|why| format!("; no finding: {why}")).unwrap_or_default();
    format!(
        "  measured: {placement} {iops} the requests per second of {against}{why}\n    {conditions}; {file}\n"
    )
}

/// The places side by side, a column for each.
fn bills(plan: &Plan) -> String {
    let money = |amount: Option<f64>| {
        let currency = plan.currency.as_deref().unwrap_or("");
        amount.map_or("not told".into(), |amount| {
            format!("{amount:.0} {currency}").trim_end().to_string()
        })
    };
    let bought = |bill: &Bill, text: String| if bill.to_buy > 0 { text } else { "-".into() };
    let size = |bytes: u64| if bytes > 0 { decimal(bytes) } else { "not told".into() };
    let row = |name: &str, cell: &dyn Fn(&Bill) -> String| -> Vec<String> {
        std::iter::once(name.to_string()).chain(plan.bills.iter().map(cell)).collect()
    };
    let places: Vec<&str> = plan.bills.iter().map(|bill| place(bill.placement)).collect();
    let mut table = output::table(&[&["PLACE"], &places[..]].concat(), &[]);
    table.add_rows([
        row("SSDs", &|bill| bill.needed.to_string()),
        row("there", &|bill| bill.in_hand.to_string()),
        row("they cost", &|bill| {
            if bill.in_hand > 0 { money(bill.in_hand_cost) } else { "-".into() }
        }),
        row("to buy", &|bill| bill.to_buy.to_string()),
        row("each from", &|bill| bought(bill, size(bill.each_bytes_min))),
        row("offer", &|bill| {
            bought(bill, bill.offer.clone().unwrap_or_else(|| "none fits".into()))
        }),
        row("cost", &|bill| bought(bill, money(bill.cost))),
        row("written to one a day", &|bill| {
            bill.written_per_day_bytes.map_or("not told".into(), |bytes| decimal(bytes as u64))
        }),
        row("the first lasts", &|bill| bill.years.map_or("not told".into(), lasting)),
        row("lost with one", &|bill| bill.failure_domain.clone()),
    ]);
    let mut text = output::render(&table);
    for advice in plan.bills.iter().flat_map(|bill| &bill.advice) {
        text.push_str(&format!("  {}\n", cited(advice)));
    }
    text
}

fn host(host: &HostPlan) -> String {
    let role = match host.role {
        Some(Role::Osd) => "OSDs",
        Some(Role::Hypervisor) => "hypervisor",
        Some(Role::Both) => "hypervisor and OSDs",
        None => "role not told",
    };
    let mut text = format!("\nHost {} ({role})\n", host.name);
    for advice in &host.advice {
        text.push_str(&format!("  {}\n", cited(advice)));
    }
    for placed in &host.placed {
        text.push_str(&ssd(placed));
    }
    text
}

fn ssd(placed: &Placed) -> String {
    let mut text =
        format!("  {} ({}): {}\n", placed.drive, decimal(placed.bytes), place(placed.placement));
    for advice in &placed.advice {
        text.push_str(&format!("    {}\n", cited(advice)));
    }
    if placed.commands.is_empty() {
        text.push_str(
            "    no commands: what would be made is not free, or its path was not told\n",
        );
        return text;
    }
    text.push_str("    commands, not run; what is on the drives they name is lost; words in capitals are yours to fill in:\n");
    for command in &placed.commands {
        text.push_str(&format!("      {command}\n"));
    }
    text
}
