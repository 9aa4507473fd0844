//! 8-bit floats in f64, by the format's definition (Micikevicius et al. 2022, table 1).

/// What a code stands for.
pub fn value(code: u8) -> f64 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    match (exponent, code & 7) {
        (15, 7) => f64::NAN,
        (0, _) => sign * fraction * 2f64.powi(-9),
        _ => sign * (1.0 + fraction / 8.0) * 2f64.powi(exponent - 7),
    }
}

/// What the code that is nearest to a number stands for, ties to even codes.
pub fn nearest(x: f64) -> f64 {
    let magnitude = x.abs().min(448.0);
    let distance = |code: u8| (value(code) - magnitude).abs();
    let code = (0..=0x7eu8).min_by(|&a, &b| {
        let even = (a & 1).cmp(&(b & 1));
        distance(a).total_cmp(&distance(b)).then(even)
    });
    value(code.unwrap()).copysign(x)
}
