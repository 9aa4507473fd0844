//! Cross-entropy from its definition.

/// What the loss is made of.
#[derive(Clone, Copy, Debug)]
pub struct Loss {
    pub ignore_index: i64,
    pub label_smoothing: f64,
    pub z_loss: f64,
    /// 0 for none.
    pub softcap: f64,
}

/// Of each token the loss, lse, and the gradient of the loss by its logits; with the magnitudes of
/// what adds up to them.
#[derive(Clone, Debug, Default)]
pub struct Tokens {
    pub losses: Vec<f64>,
    pub loss_terms: Vec<f64>,
    pub lse: Vec<f64>,
    pub gradients: Vec<f64>,
    pub gradient_terms: Vec<f64>,
    pub num_valid: usize,
}

impl Loss {
    /// The logits of a token after the softcap.
    fn capped(&self, logits: &[f64]) -> Vec<f64> {
        let cap = |z: &f64| match self.softcap > 0.0 {
            true => self.softcap * (z / self.softcap).tanh(),
            false => *z,
        };
        logits.iter().map(cap).collect()
    }

    pub fn tokens(&self, logits: &[f64], targets: &[i64], vocab: usize) -> Tokens {
        let mut all = Tokens::default();
        for (logits, target) in logits.chunks(vocab).zip(targets) {
            if *target == self.ignore_index {
                all.losses.push(0.0);
                all.loss_terms.push(0.0);
                all.lse.push(0.0);
                all.gradients.extend(vec![0.0; vocab]);
                all.gradient_terms.extend(vec![0.0; vocab]);
                continue;
            }
            all.num_valid += 1;
            let s = self.capped(logits);
            let peak = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let lse = peak + s.iter().map(|s| (s - peak).exp()).sum::<f64>().ln();
            let e = self.label_smoothing;
            let spread = e / vocab as f64;
            let t = *target as usize;
            let total: f64 = s.iter().sum();
            let magnitudes: f64 = s.iter().map(|s| s.abs()).sum();
            all.losses
                .push(lse - (1.0 - e) * s[t] - spread * total + self.z_loss * lse * lse);
            all.loss_terms.push(
                lse.abs() + peak.abs() + s[t].abs() + spread * magnitudes + self.z_loss * lse * lse,
            );
            all.lse.push(lse);
            for (i, s) in s.iter().enumerate() {
                let factor = 1.0 + 2.0 * self.z_loss * lse;
                let p = (s - lse).exp() * factor;
                let q = if i == t { 1.0 - e } else { 0.0 } + spread;
                let slope = match self.softcap > 0.0 {
                    true => 1.0 - (s / self.softcap).powi(2),
                    false => 1.0,
                };
                all.gradients.push((p - q) * slope);
                // Errors of s and lse go through the exponential.
                all.gradient_terms
                    .push(p.abs() * (1.0 + s.abs() + lse.abs()) + q);
            }
        }
        all
    }
}
