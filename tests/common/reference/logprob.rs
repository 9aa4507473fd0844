//! Log-probabilities of ids from their definition.

/// What distributions are made of.
#[derive(Clone, Copy, Debug)]
pub struct Logprob {
    pub ignore_index: i64,
    pub temperature: f64,
    /// 0 for none.
    pub softcap: f64,
}

/// Of each token the log-probability of its id, the entropy and lse; with the magnitudes of what
/// adds up to them.
#[derive(Clone, Debug, Default)]
pub struct Tokens {
    pub logprobs: Vec<f64>,
    pub entropy: Vec<f64>,
    pub lse: Vec<f64>,
    pub terms: Vec<f64>,
}

impl Logprob {
    /// A token's logits after the softcap and over the temperature, and their lse.
    fn scaled(&self, logits: &[f64]) -> (Vec<f64>, f64) {
        let cap = |z: &f64| match self.softcap > 0.0 {
            true => self.softcap * (z / self.softcap).tanh(),
            false => *z,
        };
        let s: Vec<f64> = logits.iter().map(|z| cap(z) / self.temperature).collect();
        let peak = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = peak + s.iter().map(|s| (s - peak).exp()).sum::<f64>().ln();
        (s, lse)
    }

    pub fn tokens(&self, logits: &[f64], ids: &[i64], vocab: usize) -> Tokens {
        let mut all = Tokens::default();
        for (logits, id) in logits.chunks(vocab).zip(ids) {
            let mut of_token = [0.0; 4];
            if *id != self.ignore_index {
                let (s, lse) = self.scaled(logits);
                let entropy: f64 = s.iter().map(|s| -(s - lse).exp() * (s - lse)).sum();
                let of_id = s[*id as usize];
                let greatest = s.iter().map(|s| s.abs()).fold(lse.abs(), f64::max);
                of_token = [of_id - lse, entropy, lse, 2.0 * greatest + entropy];
            }
            let [logprob, entropy, lse, terms] = of_token;
            all.logprobs.push(logprob);
            all.entropy.push(entropy);
            all.lse.push(lse);
            all.terms.push(terms);
        }
        all
    }

    /// The gradient of the logits for those of log-probabilities and entropies, and the magnitudes
    /// of what adds up to it.
    pub fn gradient(
        &self,
        logits: &[f64],
        ids: &[i64],
        vocab: usize,
        (dlogprobs, dentropy): (&[f64], &[f64]),
    ) -> (Vec<f64>, Vec<f64>) {
        let (mut gradients, mut terms) = (Vec::new(), Vec::new());
        for (token, (logits, id)) in logits.chunks(vocab).zip(ids).enumerate() {
            if *id == self.ignore_index {
                gradients.extend(vec![0.0; vocab]);
                terms.extend(vec![0.0; vocab]);
                continue;
            }
            let (s, lse) = self.scaled(logits);
            let entropy: f64 = s.iter().map(|s| -(s - lse).exp() * (s - lse)).sum();
            let (of_id, of_entropy) = (dlogprobs[token], dentropy[token]);
            for (i, s) in s.iter().enumerate() {
                let (log_p, hit) = (s - lse, f64::from(i as i64 == *id));
                let p = log_p.exp();
                let slope = match self.softcap > 0.0 {
                    true => 1.0 - (s * self.temperature / self.softcap).powi(2),
                    false => 1.0,
                };
                let g = of_id * (hit - p) - of_entropy * p * (log_p + entropy);
                gradients.push(g * slope / self.temperature);
                // Errors of s and lse go through the exponential.
                let moved = p * (1.0 + s.abs() + lse.abs());
                let great = of_id.abs() * (hit + moved)
                    + of_entropy.abs() * moved * (1.0 + log_p.abs() + entropy);
                terms.push(great / self.temperature);
            }
        }
        (gradients, terms)
    }
}
