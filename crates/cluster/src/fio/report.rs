//! fio's own report in the form in which it is kept.

use serde_json::Value;

/// Removes the bins of the latencies, which are most of a `--output-format=json+` report. The rest
/// is as in `--output-format=json`.
pub fn without_bins(mut report: Value) -> Value {
    strip(&mut report);
    report
}

fn strip(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.remove("bins");
            fields.values_mut().for_each(strip);
        }
        Value::Array(items) => items.iter_mut().for_each(strip),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_bins_are_left_out() {
        let report = json!({"fio version": "fio-3.33", "jobs": [{"read": {"clat_ns": {"mean": 1.5, "N": 2, "bins": {"1": 2}}}}]});
        let wanted = json!({"fio version": "fio-3.33", "jobs": [{"read": {"clat_ns": {"mean": 1.5, "N": 2}}}]});
        assert_eq!(without_bins(report), wanted);
    }
}
